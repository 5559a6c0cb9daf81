"""Chat messages to token ids and back, with the tokenizer and the chat template that the model brings along.

Nothing of a checkpoint is executed: the template is rendered by transformers' sandbox, and a tokenizer that needs code
of its own is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from posttrain.errors import CheckpointError, ConfigError, Problem


class ChatTokenizer:
    """Renders prompts and reads responses for one model.

    Args:
        folder: The checkpoint, with its tokenizer files and chat template.
        template_kwargs: `data.chat_template_kwargs`: further variables of the template, `NAME=JSON` each.

    Raises:
        CheckpointError: When the tokenizer cannot be loaded as it is, or has no chat template.
    """

    def __init__(self, folder: Path, template_kwargs: Sequence[str] = ()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        if not tokenizer.chat_template:
            raise CheckpointError(
                f"{folder}: no chat template; expected chat_template.jinja or one in tokenizer_config.json"
            )
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self._folder = folder
        self._template_kwargs = parse_template_kwargs(template_kwargs)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where the model's answer begins.

        Args:
            messages: Each with "role" and "content", or with "tool_calls".
            tools: JSON schemas of the functions that the answer may call.
            generation_prompt: Off, the conversation ends with its last message.

        Raises:
            CheckpointError: The template has a mistake, does not take such messages, or leaves its sandbox.
        """
        conversation = [dict(message) for message in messages]
        try:
            ids = self.tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
                **self._template_kwargs,
            )
        except TemplateError as error:
            raise CheckpointError(f"{self._folder}: the chat template cannot be rendered: {error}") from error
        return tuple(ids)

    def decode(self, response_tokens: Sequence[int]) -> str:
        """Return the text of a response; end token and other special tokens leave no trace."""
        return str(self.tokenizer.decode(list(response_tokens), skip_special_tokens=True))


def parse_template_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Return the variables that `data.chat_template_kwargs` gives to the chat template.

    Args:
        words: `NAME=VALUE` each; a value that is no JSON is a text.

    Raises:
        ConfigError: A word has no name, or names what the workflow itself decides.

    Example:
        ["enable_thinking=false", "effort=high"] -> {"enable_thinking": False, "effort": "high"}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator or not name.isidentifier() or name in ("conversation", "tokenize", "add_generation_prompt"):
            allowed = "NAME=VALUE of the template's own variables, such as enable_thinking=false"
            raise ConfigError([Problem("data.chat_template_kwargs", repr(word), allowed, "correct it")])
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found

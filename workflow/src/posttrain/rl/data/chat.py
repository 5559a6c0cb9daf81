"""Converts chat messages to token ids and back, with the model's tokenizer and chat template.

No checkpoint code is executed: transformers' sandbox renders the template, and a tokenizer that needs custom code is
refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from posttrain.checkpoint.formats.config_sections import sections
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.errors import CheckpointError, ConfigError, Problem
from posttrain.rl.data.deadline import deadline
from posttrain.rl.data.messages import RowError
from posttrain.rl.data.tool_calls import forms_of, in_form

# Template variables that the workflow sets itself.
DECIDED_VARIABLES = ("conversation", "tokenize", "add_generation_prompt")
# A text that no template contains.
_PROBED = "probed text"
# Rendering takes milliseconds, but a template may contain endless loops.
RENDER_SECONDS = 60.0
# Characters of a template's error in messages.
SHOWN_CHARACTERS = 40


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint.

    Raises:
        CheckpointError: It cannot be loaded without custom code.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError("tokenizer-invalid", f"{folder}: the tokenizer cannot be loaded: {error}") from error


class ChatTokenizer:
    """Renders prompts and reads responses for one model.

    Args:
        folder: The checkpoint, with its tokenizer files and chat template.
        template_kwargs: `data.chat_template_kwargs`: further template variables, `NAME=JSON` each.

    Raises:
        CheckpointError: The tokenizer cannot be loaded without custom code, or has no chat template.
    """

    def __init__(self, folder: Path, template_kwargs: Sequence[str] = ()):
        tokenizer = load_tokenizer(folder)
        if not tokenizer.chat_template:
            raise CheckpointError(
                "no-chat-template",
                f"{folder}: no chat template; expected chat_template.jinja or one in tokenizer_config.json\n"
                "  remedy: set model.chat_template to a file with the Jinja template that the model was trained with",
            )
        self.tokenizer = tokenizer
        self.folder = folder
        self._template_kwargs = parse_template_kwargs(template_kwargs)
        self._ends_of_turns: dict[bool, int] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, with the generation prompt.

        Args:
            messages: Each with "role" and "content", or with "tool_calls".
            tools: JSON schemas of the functions that the answer may call.
            generation_prompt: False: the conversation ends with its last message.
            template_kwargs: Further template variables, which override the tokenizer's.

        Raises:
            CheckpointError: The template has an error, rejects the messages, or violates its sandbox.
        """
        options = {**(template_kwargs or {}), "add_generation_prompt": generation_prompt, "tokenize": True}
        return tuple(self._apply(messages, tools, **options))

    def render_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return a conversation with the generation prompt as text; see `render`."""
        return str(self._apply(messages, tools, add_generation_prompt=True, tokenize=False))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a part of a rendered text."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with the special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_of_turn(self, response_tokens: Sequence[int]) -> str:
        """Return the text of a response with the special tokens, without the stop token that ends it."""
        ended = response_tokens and response_tokens[-1] in self._stops
        return self.text_of(response_tokens[:-1] if ended else response_tokens)

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of the tokens that end a response."""
        return tuple(self.text_of([token]) for token in sorted(self._stops))

    def render_answered(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token ids of a prompt and of an offline answer, which ends with a stop token like a sampled one.

        The answer is the conversation's text after the prompt's, up to the last stop token. If a template ends an
        answer with the next turn's first token, like GLM's, that token is appended.

        Args:
            messages: As for `render`.
            answer: The assistant's message.
            tools: As for `render`.

        Raises:
            ConfigError: The template renders the prompt differently with an answer, or drops part of the answer.
            CheckpointError: See `render`; or the answer's end token is unknown.
        """
        prompt, whole = (
            str(self._apply(turns, tools, add_generation_prompt=is_asked, tokenize=False))
            for turns, is_asked in ((messages, True), ([*messages, answer], False))
        )
        rest = whole.removeprefix(prompt)
        if not whole.startswith(prompt) or not _ends_with(whole, prompt, str(answer.get("content") or "")):
            raise ConfigError([self._not_to_be_learned(prompt, whole)])
        tokens, stops = self.tokenizer.encode(rest, add_special_tokens=False), self._stops
        ends = [place for place, token in enumerate(tokens, start=1) if token in stops]
        response = tokens[: ends[-1]] if ends else [*tokens, self._end_of_turn("tool_calls" in answer)]
        return self.render(messages, tools), tuple(response)

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **options: Any
    ) -> Any:
        try:
            with deadline(RENDER_SECONDS):
                shown = [in_form(message, self._forms_of_arguments) for message in messages]
                return self._as_given(shown, tools, **options)
        except TimeoutError as error:
            told = f"{self.folder}: the chat template does not end ({error}); does it loop over `range`?"
            raise CheckpointError("template-does-not-end", told) from error
        except Exception as error:  # a template is somebody's program: it raises what it likes
            reason = str(error) if isinstance(error, TemplateError | RowError) else f"{type(error).__name__}: {error}"
            place = self._place_of_error(messages, tools, options)
            told = f"{self.folder}: the chat template cannot be rendered{place}: {reason}"
            raise CheckpointError("template-rejects-messages", told) from error

    def _as_given(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **options: Any
    ) -> Any:
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            return_dict=False,
            **{**self._template_kwargs, **options},
        )

    def _place_of_error(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Return the first message at which rendering fails, by rendering prefixes of the conversation."""
        for count in range(len(messages) - 1, 0, -1):
            with contextlib.suppress(Exception):
                shown = [in_form(message, self._forms_of_arguments) for message in messages[:count]]
                self._as_given(shown, tools, **options)
                return f" with message {count + 1} ({messages[count].get('role')})"
        return ""

    @cached_property
    def _forms_of_arguments(self) -> frozenset[str]:
        return forms_of(lambda messages, tools: str(self._as_given(messages, tools, tokenize=False)))

    @cached_property
    def _stops(self) -> frozenset[int]:
        return stop_token_ids(self.folder)

    def _end_of_turn(self, calls_tool: bool) -> int:
        """Return the stop token that begins the turn after an answer; if there is none, the end of text."""
        if calls_tool in self._ends_of_turns:
            return self._ends_of_turns[calls_tool]
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        following = {"role": "tool" if calls_tool else "user", "content": "a"}
        before, after = (
            str(self._apply(some, None, add_generation_prompt=False, tokenize=False))
            for some in (turns, [*turns, following])
        )
        found = self.tokenizer.encode(after.removeprefix(before), add_special_tokens=False)[:1]
        found += [self.tokenizer.eos_token_id, *sorted(self._stops)]
        self._ends_of_turns[calls_tool] = next(token for token in found if token in self._stops)
        return self._ends_of_turns[calls_tool]

    def end_of_answer(self) -> str | None:
        """Return the template's text between an answer and the next message; None if it renders neither."""
        messages = [
            {"role": role, "content": content}
            for role, content in (("user", "a"), ("assistant", _PROBED), ("user", _PROBED + "b"))
        ]
        text = str(self._apply(messages, None, add_generation_prompt=False, tokenize=False))
        found = re.search(f"{_PROBED}(.*?){_PROBED}b", text, re.DOTALL)
        return found[1] if found else None

    def _not_to_be_learned(self, prompt: str, whole: str) -> Problem:
        place = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
        asked, answered = (text[place : place + SHOWN_CHARACTERS] for text in (prompt, whole))
        value = f"{asked!r} where it asks for an answer, {answered!r} with the answer"
        if whole.startswith(prompt):
            value = f"{answered!r} behind the prompt, which lacks some of the answer"
        allowed = "a template whose prompt is how the answered conversation begins, and that keeps the answer whole"
        remedy = (
            "let answers begin as the template's generation prompt ends (with <think>, for example), or bring along a "
            "template that leaves answers as they are"
        )
        return Problem("answer-not-whole", f"{self.folder}: chat template", value, allowed, remedy)

    def decode(self, response_tokens: Sequence[int]) -> str:
        """Return the text of a response without special tokens."""
        return str(self.tokenizer.decode(list(response_tokens), skip_special_tokens=True))


def parse_template_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Parse the template variables of `data.chat_template_kwargs`.

    Args:
        words: `NAME=VALUE` each; a value that is not JSON is a string.

    Raises:
        ConfigError: A word has no name, or names a variable that the workflow sets itself.

    Example:
        ["enable_thinking=false", "effort=high"] -> {"enable_thinking": False, "effort": "high"}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator or not name.isidentifier() or name in DECIDED_VARIABLES:
            allowed = "NAME=VALUE of the template's own variables, such as enable_thinking=false"
            raise ConfigError(
                [Problem("not-key-value", "data.chat_template_kwargs", repr(word), allowed, "correct it")]
            )
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a response.

    Args:
        folder: A checkpoint in Hub layout.

    Raises:
        CheckpointError: The checkpoint names none, or an invalid token id.
    """
    files = [path for name in ("generation_config.json", "config.json") if (path := folder / name).exists()]
    found = [part.get("eos_token_id") for path in files for _, part in sections(read_object(path))]
    # An empty list counts as missing, as in SGLang.
    ids = next((ids for ids in found if ids not in (None, [])), None)
    if ids is None:
        raise CheckpointError(
            "no-stop-token", f"{folder}: neither generation_config.json nor config.json has an eos_token_id"
        )
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(id) is int for id in ids):
        raise CheckpointError(
            "stop-token-invalid", f"{folder}: eos_token_id is {ids!r}, expected token ids\n  remedy: correct it"
        )
    return frozenset(ids)


def _ends_with(text: str, prompt: str, answer: str) -> bool:
    """Return whether a text contains the whole answer after the prompt, ignoring stripped white space."""
    squeezed, start, wanted = ("".join(some.split()) for some in (text, prompt, answer))
    place = squeezed.rfind(wanted)
    return not wanted or (place >= 0 and place + len(wanted) > len(start))

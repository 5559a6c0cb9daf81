"""Text and messages in, text out: the tokenizer of the checkpoint that is served.

Only OpenAI's endpoints speak in text. The tokenizer is read when the first of them is asked, so that an engine of a
training never waits for it, and serves checkpoints that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import CheckpointError
from posttrain.rl.data.chat import ChatTokenizer, load_tokenizer
from posttrain.rl.engines.embedded.requests import RequestError


class Texts:
    """Reads and writes text for one checkpoint.

    Args:
        folder: In Hub layout.

    All methods raise `RequestError` where the checkpoint has no tokenizer, or for messages no chat template.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the tokenizer puts before a text."""
        return list(self._tokenizer.encode(text))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins.

        Args:
            messages: As the template takes them.
            tools: JSON schemas of functions.
            more: Further variables of the template.
        """
        chat = self._chat
        try:
            return list(chat.render(messages, tools, template_kwargs=more))
        except (CheckpointError, TypeError, ValueError) as error:
            raise RequestError(f"messages: the chat template does not take them: {error}", "messages") from error

    def answer(self, tokens: Sequence[int]) -> str:
        """Return a response's text; end token and other special tokens leave no trace."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spelled(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, special ones by their names."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def stopping_at(self, stops: Sequence[str]) -> Callable[[Sequence[int]], str]:
        """Return what names the first of `stops` that a response ends with, and "" as long as it has none.

        A stop may be a special token's name. Only as many tokens are read as a stop can span: each has a byte at least.
        """
        longest = max(len(stop.encode()) for stop in stops)

        def found(tokens: Sequence[int]) -> str:
            tail = self.spelled(tokens[-longest - 1 :])
            return next((stop for stop in stops if stop in tail), "")

        return found

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._loaded(load_tokenizer)

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return self._loaded(ChatTokenizer)

    def _loaded(self, read: Callable[[Path], Any]) -> Any:
        try:
            return read(self._folder)
        except CheckpointError as error:
            raise RequestError(str(error)) from error


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of `stops` in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text

"""Encodes and decodes text with the served checkpoint's tokenizer.

Only OpenAI's endpoints use text. The tokenizer is loaded on their first request, so that an engine used for training
never waits for it and can serve checkpoints without one.
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
    """Encodes and decodes text for one checkpoint.

    Args:
        folder: Checkpoint in Hub layout.

    All methods raise `RequestError` if the checkpoint has no tokenizer, or no chat template for messages.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the tokenizer's prefix tokens."""
        return list(self._tokenizer.encode(text))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a conversation with the generation prompt.

        Args:
            messages: Messages for the chat template.
            tools: JSON schemas of functions.
            more: Further variables for the template.
        """
        chat = self._chat
        try:
            return list(chat.render(messages, tools, template_kwargs=more))
        except (CheckpointError, TypeError, ValueError) as error:
            raise RequestError(f"messages: the chat template does not take them: {error}", "messages") from error

    def answer(self, tokens: Sequence[int]) -> str:
        """Return a response's text without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spelled(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, including special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def stopping_at(self, stops: Sequence[str]) -> Callable[[Sequence[int]], str]:
        """Return a function from a response's tokens to the first of `stops` in it, "" if there is none.

        A stop may be a special token's name. It decodes only as many last tokens as a stop can span, as each token has
        at least one byte.
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
    """Return a text up to the first of `stops`."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text

"""The token ids of an episode, exactly as the model read and wrote them.

A later turn's prompt is the earlier tokens, verbatim, and the tokens of the new messages as the chat template renders
them. Nothing that was sampled is tokenised again: the text of sampled tokens may have other tokens.

Some templates rewrite earlier turns, for example without their thinking. With `environment.history=template` the
conversation then goes on in a new segment, whose prompt is the whole conversation as the template renders it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.errors import CheckpointError
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateResult
from posttrain.types import VersionSpan

Message = Mapping[str, Any]
# Stands for an earlier turn, so that the text of new messages can be found after it.
_PROBE = "probed answer"
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {"probe": _PROBE}}}
_ASKED: Message = {"role": "user", "content": "a"}
_ANSWERED: Message = {"role": "assistant", "content": _PROBE}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass
class Segment:
    """Tokens of which each later one was read or sampled after all earlier ones.

    Args:
        tokens: Read and sampled.
        loss_mask: 1 for each that was sampled.
        routes: Expert routes of all tokens before the last sampled one, if the engine reports them.
    """

    tokens: list[int]
    loss_mask: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.loss_mask = [0] * len(self.tokens)

    def add(self, tokens: Sequence[int], is_sampled: bool) -> None:
        """Append tokens."""
        self.tokens += tokens
        self.loss_mask += [int(is_sampled)] * len(tokens)

    def until_last_sampled(self) -> Segment:
        """Return the segment without what was read after the last sampled token; empty if there is none."""
        end = max((place + 1 for place, mark in enumerate(self.loss_mask) if mark), default=0)
        cut = Segment(self.tokens[:end], routes=self.routes)
        cut.loss_mask = self.loss_mask[:end]
        return cut


class Conversation:
    """An episode's messages and tokens.

    Args:
        tokenizer: Renders messages.
        messages: The first ones.
        tools: JSON schemas of the functions that may be called.
        starts_segments: Begin a new segment where the template rewrites earlier turns.

    Raises:
        CheckpointError: The template cannot render the messages.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        starts_segments: bool = False,
    ):
        self._tokenizer, self.tools, self._starts_segments = tokenizer, tools, starts_segments
        self.messages = [dict(message) for message in messages]
        self.segments = [Segment([*tokenizer.render(self.messages, tools)])]
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.num_prompt_tokens = len(self.segments[0].tokens)
        self.num_observed = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the model reads before its next response."""
        return tuple(self.segments[-1].tokens)

    def add_response(self, response: GenerateResult, message: Message) -> None:
        """Append a sampled response.

        Args:
            response: Its tokens.
            message: What they say, which templates and environments read.
        """
        self.segments[-1].add(response.output_ids, is_sampled=True)
        self.segments[-1].routes = response.routes
        self.logprobs += response.logprobs
        self.versions += response.versions
        self.messages.append(dict(message))

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what an environment answered to the last response.

        Raises:
            CheckpointError: The template cannot render the messages.
        """
        answered, last = self.messages[-1], self.segments[-1].tokens[-1]
        self.messages += [dict(message) for message in messages]
        added = continuation(self._tokenizer, messages, last, self.tools, calls_tool="tool_calls" in answered)
        if self._starts_segments and self._is_rewritten(added):
            self.segments.append(Segment([*self._tokenizer.render(self.messages, self.tools)]))
        else:
            self.segments[-1].add(added, is_sampled=False)
        self.num_observed += len(added)

    def _is_rewritten(self, added: Sequence[int]) -> bool:
        """Return whether the template renders the conversation with other words than the model has read and wrote."""
        was = self._tokenizer.text_of([*self.segments[-1].tokens, *added])
        return was != self._tokenizer.render_text(self.messages, self.tools)


def continuation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    last_token: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    calls_tool: bool = False,
) -> tuple[int, ...]:
    """Return the tokens of new messages and of the next generation prompt, after a sampled response.

    Args:
        tokenizer: Renders messages.
        messages: The new ones.
        last_token: The response's last token; -1 if there is none. If the template writes the same one at the end of a
            turn, the result begins after it.
        tools: JSON schemas of the functions that may be called.
        calls_tool: The response calls a function.

    Raises:
        CheckpointError: The template cannot render them, or ends a turn with none of the model's stop tokens.

    Example:
        ChatML, after "<|im_end|>": "\\n<|im_start|>user\\nMore<|im_end|>\\n<|im_start|>assistant\\n".
    """
    # A template that renders no calls needs none before a tool's message.
    for answer in ([_CALLED] if calls_tool else []) + [_ANSWERED]:
        _, found, ending = tokenizer.render_text([_ASKED, answer, *messages], tools).partition(_PROBE)
        stops = [place for stop in tokenizer.stop_texts if (place := ending.find(stop)) >= 0]
        if found and stops:
            last_text = tokenizer.text_of([last_token]) if last_token >= 0 else ""
            return tokenizer.encode(ending[min(stops) :].removeprefix(last_text))
    raise CheckpointError(
        "template-without-turns",
        f"{tokenizer.folder}: the chat template ends an assistant's turn with none of the stop tokens "
        f"{', '.join(tokenizer.stop_texts)}, so that no turn can follow sampled tokens\n"
        "  remedy: name the token that ends a turn as eos_token_id, or bring along a template that writes it",
    )


def drops_thinking(tokenizer: ChatTokenizer) -> bool:
    """Return whether the chat template leaves the thinking of earlier turns out.

    Raises:
        CheckpointError: The template cannot render a conversation of two turns.
    """
    answered = {"role": "assistant", "content": "a", "reasoning_content": _PROBE}
    last = tokenizer.render_text([_ASKED, answered])
    return _PROBE in last and _PROBE not in tokenizer.render_text([_ASKED, answered, _ASKED])

"""What crosses a folder border: prompts, samples, groups, batches.

Shape letters used across the library: B sequences, T tokens of a packed micro-batch, S longest sequence,
H hidden size, N heads, V vocabulary, E experts, K keys kept by the indexer (top-k).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset.

    Args:
        prompt_id: Unique in its dataset and stable: it names the sample's seed and its place in a resumed run.
        messages: Chat messages, each with "role" and "content", or with "tool_calls".
        label: What the grader compares the response with, of any JSON type; None where the dataset has no labels.
        source: The dataset that it is from, where a run mixes several.
        columns: What else the row has, in JSON's types.
        tools: JSON schemas of the functions that a response may call, None for none.
        is_text: The row has the prompt as a text, which became one user message.
        answer: The assistant's message that the label is the text of, where it has more than text.
    """

    prompt_id: int
    messages: tuple[dict[str, Any], ...]
    label: Any
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    is_text: bool = False
    answer: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the prompt as plain JSON types, without source, columns and tools where it has none."""
        always = ("prompt_id", "messages", "label")
        return {name: value for name, value in vars(self).items() if name in always or value}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> Prompt:
        """Rebuild a prompt from `as_dict`."""
        return Prompt(**{**row, "messages": tuple(row["messages"])})


@dataclass(frozen=True)
class Routes:
    """To which experts an engine has sent a sample's tokens: a part of a file of experts' numbers.

    Args:
        file: With those of other samples, too.
        offset: Bytes before this sample's.
        shape: (layers with experts, tokens, experts of a token); no engine reads a sample's last token, which has none.
        dtype: Of a number, as numpy spells it: "uint8", or "int16" with more than 256 experts.
        digest: xxh3_64 of the bytes, in hex digits.
    """

    file: str
    offset: int
    shape: tuple[int, int, int]
    dtype: str
    digest: str

    @staticmethod
    def from_dict(content: Mapping[str, Any] | None) -> Routes | None:
        """Rebuild them from `vars`, or from None.

        Raises:
            ValueError: They are not numbers of experts: what a file of objects says would be executed.
        """
        if not content:
            return None
        if content["dtype"] not in ("uint8", "int16"):
            raise ValueError(f"routes of type {content['dtype']!r}")
        return Routes(**{**content, "shape": tuple(content["shape"])})


@dataclass(frozen=True)
class Sample:
    """One prompt with one response.

    Args:
        prompt_id: The `Prompt` it answers.
        sample_index: Its place in the group, 0 .. num_samples_per_prompt - 1.
        prompt_tokens: Token ids of the rendered prompt.
        response_tokens: Token ids of the response, the end token included where the engine emitted one.
        rollout_logprobs: Natural-log probabilities that the engine gave to `response_tokens`, one each; empty for a
            response that no engine has sampled.
        finish_reason: "stop" (end token) or "length" (cut at max_response_tokens).
        weight_version: Version of the engine's weights, None where the engine does not tell.
        reward: Weighted sum of the graders' scores; None where none applied or one failed: the sample is compared with
            nobody.
        scores: Grader -> its score, None where it does not apply or has failed.
        parts: Further numbers that graders told, `grader/name` -> value.
        failure: Why a grader failed, with its name; "" where none did.
        routes: Where its tokens went in the engine; None where nobody asked.

    Example:
        prompt_tokens (5, 9, 3), response_tokens (7, 1), rollout_logprobs (-0.2, -0.1): the packed sequence has five
        tokens, and the two losses stand at positions 2 and 3, whose logits predict tokens 7 and 1.
    """

    prompt_id: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int | None
    reward: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    routes: Routes | None = None

    def __post_init__(self) -> None:
        assert self.response_tokens, f"prompt {self.prompt_id} sample {self.sample_index}: a response without tokens"
        assert len(self.rollout_logprobs) in (0, len(self.response_tokens)), (
            f"prompt {self.prompt_id} sample {self.sample_index}: {len(self.response_tokens)} response tokens, "
            f"{len(self.rollout_logprobs)} log-probabilities"
        )
        if self.routes and self.routes.shape[1] != self.num_tokens - 1:
            raise ValueError(f"routes of {self.routes.shape[1]} tokens for a sample of {self.num_tokens}")

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass(frozen=True)
class SampleGroup:
    """All samples of one prompt in one step: the unit whose rewards are compared with each other."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain JSON types."""
        return {"prompt": self.prompt.as_dict(), "samples": [_as_dict(sample) for sample in self.samples]}

    @staticmethod
    def from_dict(row: dict[str, Any]) -> SampleGroup:
        """Rebuild a group from `as_dict`; the floats come back with the same bits."""
        samples = tuple(
            Sample(
                **{
                    **sample,
                    "prompt_tokens": tuple(sample["prompt_tokens"]),
                    "response_tokens": tuple(sample["response_tokens"]),
                    "rollout_logprobs": tuple(sample["rollout_logprobs"]),
                    "routes": Routes.from_dict(sample.get("routes")),
                }
            )
            for sample in row["samples"]
        )
        return SampleGroup(Prompt.from_dict(row["prompt"]), samples)


def _as_dict(sample: Sample) -> dict[str, Any]:
    # `asdict` would look into every token of millions.
    plain = {name: value for name, value in vars(sample).items() if name != "routes"}
    return plain | ({"routes": dict(vars(sample.routes))} if sample.routes else {})


def label_text(label: Any) -> str:
    """Return a label as text: a text is itself, anything else its JSON."""
    return label.strip() if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


@dataclass(frozen=True)
class RolloutResult:
    """The groups of one step.

    Args:
        groups: In prompt order.
        num_replayed: Groups that an earlier attempt had finished.
    """

    groups: list[SampleGroup]
    num_replayed: int

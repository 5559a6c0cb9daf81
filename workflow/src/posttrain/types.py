"""The types that several packages share: prompts, samples, groups, batches.

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
        prompt_id: Unique in its dataset and stable: the sample's seed and its place in a resumed run follow from it.
        messages: Chat messages, each with "role" and "content", or with "tool_calls".
        label: The reference that the grader compares with, of any JSON type; None if the dataset has no labels.
        source: Name of its dataset, if a run mixes several.
        columns: The row's other columns, as JSON types.
        tools: JSON schemas of the functions that a response may call, or None.
        is_text: The row's prompt was a plain text, which became one user message.
        answer: The assistant's message whose text is the label, if it contains more than text.
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
        """Return the prompt as plain JSON types, without a source, columns and tools that are unset."""
        always = ("prompt_id", "messages", "label")
        return {name: value for name, value in vars(self).items() if name in always or value}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> Prompt:
        """Rebuild a prompt from `as_dict`."""
        return Prompt(**{**row, "messages": tuple(row["messages"])})


@dataclass(frozen=True)
class Routes:
    """The experts to which an engine routed a sample's tokens: a section of a file of expert ids.

    Args:
        file: The file, which also contains the ids of other samples.
        offset: Offset of this sample's section in bytes.
        shape: (MoE layers, tokens, experts per token); the last token of a sample is never routed and is left out.
        dtype: NumPy's name of the ids' type: "uint8", or "int16" with more than 256 experts.
        digest: xxh3_64 of the bytes, in hex digits.
    """

    file: str
    offset: int
    shape: tuple[int, int, int]
    dtype: str
    digest: str

    @staticmethod
    def from_dict(content: Mapping[str, Any] | None) -> Routes | None:
        """Rebuild the routes from `vars`, or from None.

        Raises:
            ValueError: The type is not one of expert ids; loading a file of objects would execute code.
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
        prompt_id: Id of its `Prompt`.
        sample_index: Its place in the group, 0 .. num_samples_per_prompt - 1.
        prompt_tokens: Token ids of the rendered prompt.
        response_tokens: Token ids of the response, including the end token if the engine emitted one.
        rollout_logprobs: The engine's natural-log probabilities of `response_tokens`, one each; empty for a
            response that no engine sampled.
        finish_reason: "stop" (end token) or "length" (cut at max_response_tokens).
        weight_version: Version of the engine's weights; None if the engine does not report it.
        reward: Weighted sum of the graders' scores; None if no grader applied or one failed, which excludes the sample
            from its group.
        scores: Grader -> its score; None if it does not apply or has failed.
        parts: Additional numbers reported by graders, `grader/name` -> value.
        failure: Why a grader failed, with its name; "" if none failed.
        routes: The experts of its tokens in the engine; None if not recorded.

    Example:
        prompt_tokens (5, 9, 3), response_tokens (7, 1), rollout_logprobs (-0.2, -0.1): the packed sequence has five
        tokens, and the two losses are at positions 2 and 3, whose logits predict tokens 7 and 1.
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
    """All samples of one prompt in one step, whose rewards are compared with each other."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain JSON types."""
        return {"prompt": self.prompt.as_dict(), "samples": [_as_dict(sample) for sample in self.samples]}

    @staticmethod
    def from_dict(row: dict[str, Any]) -> SampleGroup:
        """Rebuild a group from `as_dict`; floats keep their bits."""
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
    # `asdict` would visit each of millions of tokens.
    plain = {name: value for name, value in vars(sample).items() if name != "routes"}
    return plain | ({"routes": dict(vars(sample.routes))} if sample.routes else {})


def label_text(label: Any) -> str:
    """Return a label as text: strings unchanged, anything else as JSON."""
    return label.strip() if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


@dataclass(frozen=True)
class RolloutResult:
    """The groups of one step.

    Args:
        groups: In prompt order.
        num_replayed: Number of groups that an earlier attempt had finished.
    """

    groups: list[SampleGroup]
    num_replayed: int

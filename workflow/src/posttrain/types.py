"""The types that several packages share: prompts, trajectories, groups.

Shape letters used across the library: B sequences, T tokens of a packed micro-batch, S longest sequence,
H hidden size, N heads, V vocabulary, E experts, K keys kept by the indexer (top-k).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, groupby, islice, repeat
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
    """The experts to which an engine routed a trajectory's tokens: a section of a file of expert ids.

    Args:
        file: The file, which also contains the ids of other trajectories.
        offset: Offset of this trajectory's section in bytes.
        shape: (MoE layers, tokens, experts per token); the last token is never routed and is left out.
        dtype: NumPy's name of the ids' type: "uint8", or "int16" with more than 256 experts.
        digest: xxh3_64 of the bytes, in hex digits.
    """

    file: str
    offset: int
    shape: tuple[int, int, int]
    dtype: str
    digest: str

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Routes:
        """Rebuild the routes from `vars`.

        Raises:
            ValueError: The type is not one of expert ids; loading a file of objects would execute code.
        """
        if content["dtype"] not in ("uint8", "int16"):
            raise ValueError(f"routes of type {content['dtype']!r}")
        return Routes(**{**content, "shape": tuple(content["shape"])})


@dataclass(frozen=True)
class VersionSpan:
    """Consecutive sampled tokens of one weight version.

    Args:
        version: Version of the engine's weights; None if the engine does not report it.
        num_tokens: Sampled tokens, at least 1.
    """

    version: int | None
    num_tokens: int


@dataclass(frozen=True)
class Trajectory:
    """Everything that the model read and wrote for one prompt: the unit that flows from an engine to the loss.

    In the ordinary case it is a prompt followed by one response (`of_response`). An agent's also has tokens between
    sampled ones that the model only read, such as the output of a tool.

    Args:
        prompt_id: Id of its `Prompt`.
        sample_index: Its place in the group, 0 .. num_samples_per_prompt - 1.
        tokens: Everything the model read or wrote, in order.
        loss_mask: One per token: 1 where the model sampled the token (offline: where it is to be learned), else 0.
        logprobs: The engine's natural-log probabilities of the sampled tokens, in order; empty if no engine sampled.
        versions: Weight versions of the sampled tokens, in order; empty if no engine sampled.
        finish_reason: "stop" (end token) or "length" (cut at max_response_tokens).
        reward: Weighted sum of the graders' scores; None if no grader applied or one failed, which excludes the
            trajectory from its group.
        scores: Grader -> its score; None if it does not apply or has failed.
        parts: Additional numbers reported by graders, `grader/name` -> value.
        failure: Why a grader failed, with its name; "" if none failed.
        routes: The experts of each segment's tokens in the engine; empty if not recorded.
        segment_lengths: Tokens of each segment, in order, if there are several (`segments`); else empty.

    Raises:
        ValueError: Lengths disagree, the mask has another value, or it marks no token or the first, which nothing
            predicts.

    Example:
        Tokens (5, 9, 3, 7, 1), mask (0, 0, 0, 1, 1), logprobs (-0.2, -0.1): the losses are at positions 2 and 3, whose
        logits predict tokens 7 and 1.
    """

    prompt_id: int
    sample_index: int
    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    reward: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    routes: tuple[Routes, ...] = ()
    segment_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if wrong := self._problem():
            raise ValueError(f"prompt {self.prompt_id} sample {self.sample_index}: {wrong}")

    def _problem(self) -> str:
        """Return what is inconsistent, "" if nothing is."""
        if len(self.loss_mask) != len(self.tokens):
            return f"{len(self.tokens)} tokens with a loss mask of {len(self.loss_mask)}"
        if not {*self.loss_mask} <= {0, 1}:
            return f"the loss mask has values {sorted({*self.loss_mask})}; only 0 and 1 are allowed"
        count = self.num_sampled
        if not count:
            return "no token is sampled"
        if self.loss_mask[0]:
            return "the first token is sampled, but nothing predicts it"
        if len(self.logprobs) not in (0, count):
            return f"{count} sampled tokens, {len(self.logprobs)} log-probabilities"
        if any(span.num_tokens < 1 for span in self.versions):
            return "a weight version without tokens"
        if self.versions and (covered := sum(span.num_tokens for span in self.versions)) != count:
            return f"{count} sampled tokens, weight versions of {covered}"
        return (self.segment_lengths and self._problem_of_segments()) or self._problem_of_routes()

    def _problem_of_routes(self) -> str:
        lengths, found = self.segment_lengths or (self.num_tokens,), tuple(routes.shape[1] for routes in self.routes)
        if found and found != tuple(length - 1 for length in lengths):
            return f"segments of {lengths} tokens, routes of {found}; the last token of a segment has none"
        return ""

    def _problem_of_segments(self) -> str:
        lengths = self.segment_lengths
        if sum(lengths) != self.num_tokens or min(lengths) < 1:
            return f"{self.num_tokens} tokens, segments of {lengths}"
        masks = [self.loss_mask[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
        if any(mask[0] or not any(mask) for mask in masks):
            return "a segment that begins with a sampled token, or has none"
        return ""

    @classmethod
    def of_response(
        cls,
        prompt_tokens: Sequence[int],
        response_tokens: Sequence[int],
        logprobs: Sequence[float] = (),
        version: int | None = None,
        *,
        versions: tuple[VersionSpan, ...] = (),
        prompt_id: int,
        sample_index: int = 0,
        finish_reason: str = "stop",
        reward: float | None = None,
        **graded: Any,
    ) -> Trajectory:
        """Return the trajectory of one prompt with one response.

        Args:
            prompt_tokens: Token ids of the rendered prompt.
            response_tokens: Token ids of the response, including the end token if the engine emitted one.
            logprobs: One per response token; empty if no engine sampled the response.
            version: Weight version that sampled the response; None if unknown.
            versions: Weight versions that sampled it, instead of `version`.
            prompt_id: See the class, as the others.
            sample_index: Its place in the group.
            finish_reason: "stop" or "length".
            reward: None if not graded.
            graded: The other fields.
        """
        count = len(response_tokens)
        is_sampled = count > 0 and (len(logprobs) > 0 or version is not None)
        return cls(
            prompt_id=prompt_id,
            sample_index=sample_index,
            tokens=(*prompt_tokens, *response_tokens),
            loss_mask=(0,) * len(prompt_tokens) + (1,) * count,
            logprobs=tuple(logprobs),
            versions=versions or (VersionSpan(version, count),) * is_sampled,
            finish_reason=finish_reason,
            reward=reward,
            **graded,
        )

    def segments(self) -> list[Trajectory]:
        """Return the trajectory's parts that the model read each as a sequence of its own.

        There are several where a chat template rewrites earlier turns: what the model then read does not begin with
        what it had read before. All have the episode's reward and scores.
        """
        if not self.segment_lengths:
            return [self]
        logprobs, versions = iter(self.logprobs), _each_version(self.versions)
        routes = iter(self.routes)
        found = []
        for length, end in zip(self.segment_lengths, accumulate(self.segment_lengths), strict=True):
            tokens, mask = self.tokens[end - length : end], self.loss_mask[end - length : end]
            count = sum(mask)
            found.append(
                replace(
                    self,
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=tuple(islice(logprobs, count)),
                    versions=spans_of(islice(versions, count)),
                    routes=tuple(islice(routes, 1)),
                    segment_lengths=(),
                )
            )
        return found

    @property
    def num_tokens(self) -> int:
        """Number of tokens, read and sampled."""
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """The sampled tokens, without those that the model read between them."""
        return tuple(compress(self.tokens, self.loss_mask))

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens before the first sampled one."""
        return self.tokens[: self.loss_mask.index(1)]

    @property
    def oldest_version(self) -> int | None:
        """The lowest reported weight version; None if none is reported."""
        return min(self._reported(), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest reported weight version; None if none is reported."""
        return max(self._reported(), default=None)

    def _reported(self) -> list[int]:
        return [span.version for span in self.versions if span.version is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the trajectory as plain JSON types; the mask is a text with one digit per token."""
        # `asdict` would visit each of millions of tokens.
        plain = {name: value for name, value in vars(self).items() if name not in ("routes", "segment_lengths")} | {
            "loss_mask": bytes(self.loss_mask).translate(_TO_DIGITS).decode(),
            "versions": [dict(vars(span)) for span in self.versions],
        }
        segments = {"segment_lengths": list(self.segment_lengths)} if self.segment_lengths else {}
        routes = {"routes": [dict(vars(one)) for one in self.routes]} if self.routes else {}
        return plain | routes | segments

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """Rebuild a trajectory from `as_dict`, or from a sample that an older release stored; floats keep their bits.

        Raises:
            ValueError: It is inconsistent.
        """
        told = row.get("routes") or []  # older releases stored one object
        routes = tuple(map(Routes.from_dict, [told] if isinstance(told, Mapping) else told))
        if "response_tokens" in row:
            return _from_old_sample(row, routes)
        mask = str(row["loss_mask"]).encode().translate(_FROM_DIGITS)
        versions = tuple(VersionSpan(**span) for span in row["versions"])
        rows = {"tokens": tuple(row["tokens"]), "loss_mask": tuple(mask), "logprobs": tuple(row["logprobs"])}
        segments = tuple(row.get("segment_lengths", ()))
        return cls(**{**row, **rows, "versions": versions, "routes": routes, "segment_lengths": segments})


def _each_version(spans: Sequence[VersionSpan]) -> Iterator[int | None]:
    return chain.from_iterable(repeat(span.version, span.num_tokens) for span in spans)


def spans_of(versions: Iterable[int | None]) -> tuple[VersionSpan, ...]:
    """Return the spans of the weight version of each token."""
    return tuple(VersionSpan(version, len([*some])) for version, some in groupby(versions))


_TO_DIGITS, _FROM_DIGITS = bytes.maketrans(b"\0\1", b"01"), bytes.maketrans(b"01", b"\0\1")
# Fields of a stored sample, the form of a trajectory before there were several sampled stretches -> `of_response`'s.
_OLD_FIELDS = {"rollout_logprobs": "logprobs", "weight_version": "version"}


def _from_old_sample(row: Mapping[str, Any], routes: tuple[Routes, ...]) -> Trajectory:
    return Trajectory.of_response(
        **{_OLD_FIELDS.get(name, name): value for name, value in row.items()} | {"routes": routes}
    )


@dataclass(frozen=True)
class TrajectoryGroup:
    """All trajectories of one prompt in one step, whose rewards are compared with each other.

    Args:
        prompt: The prompt.
        trajectories: One per sample.
        position: Its place in the run's queue; -1 where groups belong to a step's place.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    position: int = -1

    @property
    def oldest_version(self) -> int | None:
        """The lowest reported weight version; None if none is reported."""
        return min((one.oldest_version for one in self.trajectories if one.oldest_version is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain JSON types, without a position that is unset."""
        position = {"position": self.position} if self.position >= 0 else {}
        trajectories = [trajectory.as_dict() for trajectory in self.trajectories]
        return {"prompt": self.prompt.as_dict(), "trajectories": trajectories, **position}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> TrajectoryGroup:
        """Rebuild a group from `as_dict`, or from a group that an older release stored; floats keep their bits."""
        stored = row["samples"] if "samples" in row else row["trajectories"]
        trajectories = tuple(Trajectory.from_dict(one) for one in stored)
        return TrajectoryGroup(Prompt.from_dict(row["prompt"]), trajectories, row.get("position", -1))


def label_text(label: Any) -> str:
    """Return a label as text: strings unchanged, anything else as JSON."""
    return label.strip() if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


@dataclass(frozen=True)
class RolloutResult:
    """The groups of one step.

    Args:
        groups: In prompt order.
        num_replayed: Number of groups that an earlier attempt had finished.
        queue: Metrics of the queue that the groups passed through; empty without one.
    """

    groups: list[TrajectoryGroup]
    num_replayed: int
    queue: Mapping[str, float] = field(default_factory=dict)

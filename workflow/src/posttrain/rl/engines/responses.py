"""Types for /generate requests and responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.rl.engines.routes import ASKED, RoutesLayout
from posttrain.types import VersionSpan

# The weight version that an engine started without weights reports until its first update.
NO_WEIGHTS = "none"
# gloo's errors on a rank that waits for a peer that has left, and on that peer.
LEFT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "caused pair closure")


@dataclass(frozen=True)
class GenerateRequest:
    """One response to sample.

    Args:
        input_ids: Token ids of the rendered prompt.
        sampling_seed: See `sampling_seed`; SGLang uses it under --enable-deterministic-inference.
        max_new_tokens: Length limit of the response.
        temperature: For sampling and log-probabilities.
        top_p: Nucleus sampling.
        ignore_eos: Continue to `max_new_tokens` after the end token (benchmarks).
        routes: Layout in which to return the tokens' expert routes; None: do not.
    """

    input_ids: Sequence[int]
    sampling_seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    ignore_eos: bool = False
    routes: RoutesLayout | None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        """SGLang's `sampling_params` of the request."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
            "sampling_seed": self.sampling_seed,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True)
class GenerateResult:
    """One sampled response.

    Args:
        output_ids: Token ids, including the end token if sampled.
        logprobs: Natural-log probability of each, the engine's exact float32 value.
        finish_reason: "stop" (end token), "length" (truncated), or "abort" (ended by the client's own pause).
        weight_version: Version of the weights that sampled its last token; None before the first update.
        routes: [tokens, MoE layers, experts per token] of prompt and response except the last token, if requested.
        versions: Versions of the weights that sampled the tokens, in order.
        num_cached: Prompt tokens that the engine had in its prefix cache.
        engine: Number of the engine that sampled it; None if it was not one of several.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int | None
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    versions: tuple[VersionSpan, ...] = ()
    num_cached: int = field(default=0, compare=False)
    engine: int | None = field(default=None, compare=False)


def check_prompts(requests: Sequence[GenerateRequest], vocab_size: int | None) -> None:
    """Raise `ValueError` for an empty prompt, or one with a token that is not below `vocab_size`."""
    for place, request in enumerate(requests):
        if not request.input_ids:
            raise ValueError(f"prompt {place} is empty")
        worst = max(request.input_ids, key=lambda token: token if token >= 0 else float("inf"))
        if worst < 0 or (vocab_size is not None and worst >= vocab_size):
            raise ValueError(f"prompt {place}: token {worst} is not in the vocabulary of {vocab_size}")


def generate_body(requests: Sequence[GenerateRequest], cache_key: str = "") -> dict[str, Any]:
    """Return the JSON body of one batched /generate request.

    Args:
        requests: The batch.
        cache_key: Prefix-cache entries of requests with another key are not reused.
    """
    return {
        "input_ids": [list(request.input_ids) for request in requests],
        "sampling_params": [request.sampling_params for request in requests],
        "return_logprob": True,
        **({ASKED: True} if any(request.routes for request in requests) else {}),
        **({"extra_key": cache_key} if cache_key else {}),
    }


def parse_generate_answer(
    answer: Any, requests: Sequence[GenerateRequest], may_abort: bool = False
) -> list[GenerateResult]:
    """Return the results of a batched /generate answer.

    Args:
        answer: The JSON content.
        requests: The batch.
        may_abort: A result may have been aborted, with any number of tokens.

    Raises:
        ValueError: The answer is not one complete result per request.
    """
    if not isinstance(answer, list) or len(answer) != len(requests):
        count = len(answer) if isinstance(answer, list) else f"a {type(answer).__name__} instead of"
        raise ValueError(f"{count} results for {len(requests)} requests")
    return [
        _parse_result(place, item, request, may_abort)
        for place, (item, request) in enumerate(zip(answer, requests, strict=True))
    ]


def _parse_result(place: int, item: Any, request: GenerateRequest, may_abort: bool) -> GenerateResult:
    try:
        meta = item["meta_info"]
        finish_reason, end_token = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
        logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
        tokens = tuple(int(entry[1]) for entry in meta["output_token_logprobs"])
        version, versions = meta.get("weight_version"), _read_versions(meta, len(tokens))
        if NO_WEIGHTS in (version, *(name for name, _ in versions)):
            raise ValueError("tokens of an engine that has not got its weights yet")
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"an unreadable result at place {place}: {error!r}") from error
    is_aborted = may_abort and finish_reason == "abort"
    if not (is_aborted or (finish_reason in ("stop", "length") and tokens)) or len(tokens) > request.max_new_tokens:
        found = f"{len(tokens)} of {request.max_new_tokens} tokens, finish reason {finish_reason!r}"
        raise ValueError(f"{found}, at place {place}")
    if isinstance(end_token, int) and tokens[-1] != end_token:
        # Without the end token the policy would not learn to end.
        raise ValueError(f"the end token {end_token} is not in the answer at place {place}, which it ended")
    try:
        num_prompt = len(request.input_ids)
        # What an aborted request knows is read again with the next one, which reports all.
        layout = None if is_aborted else request.routes
        routes = layout.read(meta, num_prompt, num_prompt + len(tokens)) if layout else None
    except ValueError as error:
        raise ValueError(f"{error}, at place {place}") from error
    spans = tuple(VersionSpan(_version_number(name), count) for name, count in versions)
    cached = int(meta.get("cached_tokens") or 0)
    return GenerateResult(tokens, logprobs, finish_reason, _version_number(version), routes, spans, cached)


def _read_versions(meta: Mapping[str, Any], num_tokens: int) -> list[tuple[Any, int]]:
    """Return (version, number of tokens) of consecutive tokens; one span if the engine names only one version.

    Raises:
        ValueError: The spans are not those of all tokens, in order.
    """
    if "weight_versions" not in meta:
        return [(meta.get("weight_version"), num_tokens)] if num_tokens else []
    spans = [(span["version"], int(span["start"]), int(span["end"])) for span in meta["weight_versions"]]
    if not num_tokens and all(start == end == 0 for _, start, end in spans):  # SGLang has one for no tokens
        return []
    edges = [0, *(end for _, _, end in spans)]
    if edges[-1] != num_tokens or any(
        start != edge or start >= end for (_, start, end), edge in zip(spans, edges, strict=False)
    ):
        raise ValueError(f"weight versions of other tokens than its {num_tokens}: {spans}")
    return [(version, end - start) for version, start, end in spans]


def of_first_weights(result: GenerateResult) -> GenerateResult:
    """Return the result of an engine that serves its initial weights: tokens without a version are of version 0."""
    spans = tuple(VersionSpan(span.version or 0, span.num_tokens) for span in result.versions)
    return dataclasses.replace(result, versions=spans)


def _version_number(version: Any) -> int | None:
    return int(version) if version is not None and str(version).isdigit() else None


def answers_of_ranks(engine: str, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the answers of an engine's ranks to a weight command (`posttrain_weights.engine_handlers`).

    Args:
        engine: Name of the engine.
        answers: In any order; with DP attention each rank returns all of them.

    Raises:
        RuntimeError: A rank failed; names it. Of several, the root cause, not a rank that only missed a peer.
    """
    found = {answer["parallelism_info"][0]["tp_rank"]: answer["checksums"] for answer in answers}
    failures = [f"{engine}, rank {rank}: {told['error']}" for rank, told in found.items() if "error" in told]
    if failures:
        raise RuntimeError(min(failures, key=has_left))
    return [found[rank]["answer"] for rank in sorted(found)]


def has_left(failure: str) -> bool:
    """Return whether a failure of a weight transfer only reports that a peer has left."""
    return any(words in failure for words in LEFT)

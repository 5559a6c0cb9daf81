"""A response that several requests sample, because new weights or a dead engine interrupt it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.types import VersionSpan

# SGLang's reason of a response that ended before its time.
ABORTED = "abort"


@dataclass
class PartialResponse:
    """The part of a response that engines have sampled so far.

    Args:
        output_ids: The tokens.
        logprobs: The log-probability of each.
        versions: The weight versions that sampled them.
        finish_reason: Of the last request; `ABORTED` until the response is complete.
        num_cached: Prompt tokens that the first request found in a prefix cache.
        engine: Number of the last engine.
        routes: Of the last request, which has read all tokens again or kept what it knew of them.
    """

    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: str = ABORTED
    num_cached: int = 0
    engine: int | None = None
    routes: np.ndarray | None = None

    def add(self, result: GenerateResult) -> None:
        """Append the tokens of one more request."""
        self.num_cached = self.num_cached if self.output_ids else result.num_cached
        self.output_ids += tuple(result.output_ids)
        self.logprobs += tuple(result.logprobs)
        self.versions += tuple(result.versions)
        self.finish_reason, self.engine, self.routes = result.finish_reason, result.engine, result.routes

    def rest_of(self, request: GenerateRequest, seed: int) -> GenerateRequest:
        """Return the request for what is missing."""
        return dataclasses.replace(
            request,
            input_ids=(*request.input_ids, *self.output_ids),
            max_new_tokens=request.max_new_tokens - len(self.output_ids),
            sampling_seed=seed,
        )

    def as_result(self) -> GenerateResult:
        """Return the complete response."""
        last = self.versions[-1].version
        return GenerateResult(
            self.output_ids,
            self.logprobs,
            self.finish_reason,
            last,
            self.routes,
            versions=self.versions,
            num_cached=self.num_cached,
            engine=self.engine,
        )

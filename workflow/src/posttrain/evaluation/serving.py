"""Speed of a served model by concurrency.

At a concurrency of c, c clients send one streamed request after the other until all requests of the level are
answered. Per level:

- output tokens per second: all tokens divided by the time from the first request to the last answer;
- TTFT, time to first token: from sending a request to its first token;
- TPOT, time per output token: from the first token to the last, divided by the tokens after the first;
- latency: from sending a request to its last token.

Every response has the same length: the end token is ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from posttrain.engines.client import EngineClient
from posttrain.engines.responses import GenerateRequest
from posttrain.engines.sampling_seed import sampling_seed

SEED_TAG = "serving"
# The first request compiles and fills caches; the second one shows that this is over.
NUM_WARM_UP_REQUESTS = 2


@dataclass(frozen=True)
class RequestTimes:
    """When the tokens of one request came, in seconds.

    Args:
        first_token: From sending to the first token.
        last_token: From sending to the last token.
        num_tokens: Tokens of the response.
    """

    first_token: float
    last_token: float
    num_tokens: int

    @property
    def per_output_token(self) -> float:
        """Seconds per token after the first; 0 for a response of one token."""
        return (self.last_token - self.first_token) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class Level:
    """One row of the table; times in milliseconds."""

    concurrency: int
    num_requests: int
    output_tokens_per_second: float
    ttft_ms_median: float
    ttft_ms_p99: float
    tpot_ms_median: float
    latency_ms_median: float


async def measure_serving(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    concurrencies: Sequence[int],
    requests_per_level: int,
    output_tokens: int,
) -> list[Level]:
    """Measure every concurrency, one after the other, after a few requests that do not count.

    Args:
        client: Of engines that are ready.
        prompts: Token ids; taken in turn.
        concurrencies: Requests in flight.
        requests_per_level: Requests per concurrency, at least as many as are in flight.
        output_tokens: Length of every response.
    """
    await _measure_level(client, _requests(prompts, NUM_WARM_UP_REQUESTS, output_tokens), concurrency=1)
    levels = []
    for concurrency in concurrencies:
        requests = _requests(prompts, max(requests_per_level, concurrency), output_tokens)
        levels.append(await _measure_level(client, requests, concurrency))
    return levels


def format_table(levels: Sequence[Level]) -> str:
    """Return the levels as text, one line each."""
    head = ("concurrency", "output tok/s", "TTFT ms", "TTFT p99 ms", "TPOT ms", "latency ms")
    lines = ["  ".join(f"{name:>12}" for name in head)]
    for level in levels:
        row = [value for name, value in asdict(level).items() if name != "num_requests"]
        lines.append("  ".join(f"{value:>12}" if isinstance(value, int) else f"{value:>12.1f}" for value in row))
    return "\n".join(lines)


def summarize_level(concurrency: int, times: Sequence[RequestTimes], seconds: float) -> Level:
    """Return the row of a level.

    Args:
        concurrency: Requests in flight.
        times: Of every request.
        seconds: From the first request to the last answer.
    """
    first = sorted(request.first_token * 1e3 for request in times)
    return Level(
        concurrency=concurrency,
        num_requests=len(times),
        output_tokens_per_second=sum(request.num_tokens for request in times) / seconds,
        ttft_ms_median=_percentile(first, 50),
        ttft_ms_p99=_percentile(first, 99),
        tpot_ms_median=_percentile(sorted(request.per_output_token * 1e3 for request in times), 50),
        latency_ms_median=_percentile(sorted(request.last_token * 1e3 for request in times), 50),
    )


def _requests(prompts: Sequence[Sequence[int]], count: int, output_tokens: int) -> list[GenerateRequest]:
    seeds = [sampling_seed(0, SEED_TAG, number, 0) for number in range(count)]
    return [
        GenerateRequest(prompts[number % len(prompts)], seed, output_tokens, ignore_eos=True)
        for number, seed in enumerate(seeds)
    ]


async def _measure_level(client: EngineClient, requests: Sequence[GenerateRequest], concurrency: int) -> Level:
    waiting = iter(enumerate(requests))
    started = time.perf_counter()
    parts = await asyncio.gather(*(_send_in_turn(client, waiting) for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    return summarize_level(concurrency, [times for part in parts for times in part], seconds)


async def _send_in_turn(client: EngineClient, waiting: Iterator[tuple[int, GenerateRequest]]) -> list[RequestTimes]:
    times = []
    for number, request in waiting:
        started, first, last, num_tokens = time.perf_counter(), 0.0, 0.0, 0
        async for tokens_so_far in client.stream(request, number):
            num_tokens = tokens_so_far
            last = time.perf_counter() - started
            first = first or last
        if num_tokens != request.max_new_tokens:
            raise RuntimeError(f"request {number} was answered with {num_tokens} of {request.max_new_tokens} tokens")
        times.append(RequestTimes(first, last, num_tokens))
    return times


def _percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed."""
    place = -(-len(ascending) * percent // 100)
    return ascending[max(0, int(place) - 1)]

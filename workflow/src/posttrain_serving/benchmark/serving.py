"""Speed of a served model by concurrency.

At a concurrency of c, c clients send one streamed request after another until all requests of the row are answered:

- output tokens per second: all tokens, divided by the time from the first request to the last token;
- TTFT, time to first token: from sending a request to reading its first token;
- TPOT, time per output token: time from the first token to the last, divided by the number of tokens after the first;
- ITL, inter-token latency: time from one chunk with tokens to the next, so tokens of one chunk count once;
- latency: from sending a request to its last token.

TTFT, TPOT and latency are per request, ITL is over all gaps of all requests; percentiles are numpy's. Each row also has
the lag of the load generator, to detect rows that the generator limited.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import numpy as np

from posttrain.errors import ConfigError, Problem
from posttrain.http_answers import read_bounded
from posttrain.report.progress import ProgressBar
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.engines.streaming import Endpoint, Prompt, StreamedRequest, Timeline, open_session, stream

SEED_TAG = "serving"
# Number of warm-up requests before a row, at most one per client: kernels compile, caches fill.
MOST_WARM_UP_REQUESTS = 16
# At a concurrency of 1, fewer requests give no percentiles.
FEWEST_REQUESTS = 8
# Accuracy of times, also as a share of the gap between tokens; beyond it, the generator limits the row.
TOLERANCE_MS, TOLERANCE_SHARE = 2.0, 0.01
BUSY_SHARE = 0.9
BEAT_SECONDS = 0.01
# SGLang's own API repeats all tokens so far in each chunk, so lines may be long.
READ_BYTES = 1 << 22
# Files that a Python process opens besides connections.
SPARE_FILES = 128


@dataclass(frozen=True)
class Load:
    """The load of a row.

    Args:
        output_tokens: Length of every response.
        requests_per_client: Requests per client; a row has at least `FEWEST_REQUESTS`.
        seed: Seed of prompts and sampling.
        temperature: Sampling temperature; 0: greedy.
        timeout_seconds: A response must be complete within this.
    """

    output_tokens: int
    requests_per_client: int = 4
    seed: int = 1
    temperature: float = 0.0
    timeout_seconds: float = 3600.0


@dataclass(frozen=True)
class Level:
    """One row of the table; times are medians in milliseconds unless noted.

    Args:
        concurrency: Requests in flight.
        output_tokens_per_second: Throughput of all requests together.
        ttft_ms: Time to first token.
        tpot_ms: Time per output token after the first.
        itl_p99_ms: 99th percentile of inter-token latency.
        itl_p50_ms: Median of inter-token latency.
        ttft_p99_ms: 99th percentile of time to first token.
        tpot_p99_ms: 99th percentile of time per output token.
        latency_ms: From sending a request to its last token.
        num_requests: Requests of this row, without warm-up.
        input_tokens: Mean per request, as reported by the endpoint.
        tokens_per_chunk: Mean; above 1, gaps between chunks are not gaps between tokens.
        retries: Requests that were rejected and sent again.
        seconds: From the first request to the last token.
        generator_lag_ms: 99th percentile of the generator's lag in reading.
        generator_cpu_ms_per_chunk: The generator's CPU time per chunk.
        is_generator_bound: The generator may have limited this row, or its lag exceeds the tolerance.
    """

    concurrency: int
    output_tokens_per_second: float
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float
    itl_p50_ms: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    latency_ms: float
    num_requests: int
    input_tokens: float
    tokens_per_chunk: float
    retries: int
    seconds: float
    generator_lag_ms: float
    generator_cpu_ms_per_chunk: float
    is_generator_bound: bool


# (row number, request number) -> prompt; all prompts differ, so that no cache has them.
PromptOf = Callable[[int, int], Prompt]


async def measure_level(endpoints: Sequence[Endpoint], prompt_of: PromptOf, concurrency: int, load: Load) -> Level:
    """Measure one concurrency, after warm-up requests.

    Args:
        endpoints: Endpoints of one model; requests are distributed round-robin.
        prompt_of: Prompts.
        concurrency: Requests in flight.
        load: The load to send.

    Raises:
        ConfigError: The limit of open files is too low.
        EngineError: A request failed; the others are cancelled.
    """
    _allow_files(concurrency)
    num_warm_up = min(concurrency, MOST_WARM_UP_REQUESTS)
    num_requests = max(concurrency * load.requests_per_client, FEWEST_REQUESTS)
    seeds = [sampling_seed(load.seed, SEED_TAG, concurrency, number) for number in range(num_warm_up + num_requests)]
    requests = [
        StreamedRequest(prompt_of(concurrency, number), load.output_tokens, seed, load.temperature)
        for number, seed in enumerate(seeds)
    ]
    connector = aiohttp.TCPConnector(limit=0)
    async with open_session(load.timeout_seconds, connector=connector, read_bufsize=READ_BYTES) as session:

        async def send(number: int) -> Timeline:
            return await stream(session, endpoints[number % len(endpoints)], requests[number])

        await _send_all(send, range(num_warm_up), num_warm_up, ProgressBar("", 0, quiet=True))
        await _open_connections(session, endpoints, concurrency)
        counted = range(num_warm_up, len(requests))
        with ProgressBar(f"{concurrency} in flight", num_requests, "requests") as bar:
            async with _watch_generator() as generator:
                timelines = await _send_all(send, counted, concurrency, bar)
    return summarize_level(concurrency, timelines, generator)


async def _open_connections(session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], count: int) -> None:
    """Open a connection for each client, so that the first requests are sent at once."""

    async def touch(number: int) -> None:
        endpoint = endpoints[number % len(endpoints)]
        path = f"{endpoint.url}/v1/models"
        async with session.get(path, headers=endpoint.headers, allow_redirects=False) as answer:
            await read_bounded(answer.content.iter_any())

    await asyncio.gather(*map(touch, range(count)), return_exceptions=True)


@dataclass
class Generator:
    """The generator's lag and CPU time in one row."""

    lags_ms: list[float]
    cpu_seconds: float = 0.0
    seconds: float = 0.0


def summarize_level(concurrency: int, timelines: Sequence[Timeline], generator: Generator) -> Level:
    """Return the row of one concurrency.

    Args:
        concurrency: Requests in flight.
        timelines: Timelines of all requests, each with at least one chunk.
        generator: The generator's lag and CPU time.
    """
    seconds = max(line.chunks[-1] for line in timelines) - min(line.sent for line in timelines)
    num_tokens, num_chunks = sum(line.output_tokens for line in timelines), sum(len(line.chunks) for line in timelines)
    ttft = _ms([line.chunks[0] - line.sent for line in timelines])
    tpot = _ms([(line.chunks[-1] - line.chunks[0]) / max(1, line.output_tokens - 1) for line in timelines])
    gaps = _ms(np.concatenate([np.diff(line.chunks) for line in timelines]))
    itl_p50, lag = _percentile(gaps, 50), _percentile(np.array(generator.lags_ms), 99)
    is_late = lag > max(TOLERANCE_MS, TOLERANCE_SHARE * itl_p50)
    return Level(
        concurrency=concurrency,
        output_tokens_per_second=num_tokens / seconds,
        ttft_ms=_percentile(ttft, 50),
        tpot_ms=_percentile(tpot, 50),
        itl_p99_ms=_percentile(gaps, 99),
        itl_p50_ms=itl_p50,
        ttft_p99_ms=_percentile(ttft, 99),
        tpot_p99_ms=_percentile(tpot, 99),
        latency_ms=_percentile(_ms([line.chunks[-1] - line.sent for line in timelines]), 50),
        num_requests=len(timelines),
        input_tokens=float(np.mean([line.input_tokens for line in timelines])),
        tokens_per_chunk=num_tokens / num_chunks,
        retries=sum(line.retries for line in timelines),
        seconds=seconds,
        generator_lag_ms=lag,
        generator_cpu_ms_per_chunk=generator.cpu_seconds * 1e3 / num_chunks,
        is_generator_bound=is_late or generator.cpu_seconds > BUSY_SHARE * generator.seconds,
    )


async def _send_all(
    send: Callable[[int], Awaitable[Timeline]], numbers: Sequence[int], concurrency: int, bar: ProgressBar
) -> list[Timeline]:
    waiting, timelines = iter(numbers), list[Timeline]()
    began, num_tokens = time.perf_counter(), 0

    async def in_turn(waiting: Iterator[int]) -> None:
        nonlocal num_tokens
        for number in waiting:
            timelines.append(await send(number))
            num_tokens += timelines[-1].output_tokens
            bar.advance(note=f"{num_tokens / (time.perf_counter() - began):,.0f} tokens/s")

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(in_turn(waiting))
    except* EngineError as failures:
        raise _first(failures) from None
    return timelines


def _first(failures: BaseExceptionGroup[EngineError]) -> EngineError:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, EngineError)
    return failure


@asynccontextmanager
async def _watch_generator() -> AsyncIterator[Generator]:
    """Record this event loop's timer lag during the block; responses wait as long before they are read."""
    generator = Generator([0.0])

    async def beat() -> None:
        while True:
            due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            generator.lags_ms.append((time.perf_counter() - due) * 1e3)

    cpu, began, beating = time.process_time(), time.perf_counter(), asyncio.create_task(beat())
    try:
        yield generator
    finally:
        beating.cancel()
        generator.cpu_seconds, generator.seconds = time.process_time() - cpu, time.perf_counter() - began


def _allow_files(concurrency: int) -> None:
    """Raise this process's limit of open files to one connection per client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = concurrency + SPARE_FILES
    if hard not in (-1, resource.RLIM_INFINITY) and hard < wanted:
        allowed = f"at most {hard - SPARE_FILES}: a process may open {hard} files here"
        raise ConfigError(
            [
                Problem(
                    "too-few-open-files",
                    "concurrency",
                    str(concurrency),
                    allowed,
                    "raise `ulimit -Hn`, or leave it out",
                )
            ]
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _ms(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.asarray(seconds, dtype=float) * 1e3


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else 0.0

"""Serving speed of an engine: clients that send one request after another, and a roofline model of each engine step.

c clients send requests of n_in prompt tokens and receive n_out tokens each. A step gives every running request a token
and fills the rest of its token budget with prompts, first come, first served. A request starts once the cache has space
for its prompt; if the next tokens have no space, the newest request is preempted and restarts. A step of B running
requests and P prompt tokens takes the maximum of

    layers t_layer + max((weights + cache of B) / (memory bandwidth share), B t_token) + P t_token
    B / burst

    t_token = FLOPs of a token / (GPUs peak share)

with the bytes of `decoding`; only the experts selected by any of the B + P tokens are read.

The three constants (`ServingRates`) are fitted on two rows of a public server's table, `published_serving.csv`. The
burst is a figure of the same page outside the table: the server's highest rate in tokens per second. For the other
seven rows the tokens per second are within 15 %; the peak is 3 % too low and at 256 clients instead of 128. The page
does not explain the burst's limit; with the roofline alone, 256 requests decode in 36 ms instead of the burst's 50 ms,
and the peak is 8 % too high. `decoding` has other constants: those of training's rollouts, whose prompts are prefilled
all at once.

Sources: Pope et al., arXiv 2211.05102, section 2 (roofline); Yu et al., Orca, OSDI 2022 (iteration-level scheduling);
Agrawal et al., arXiv 2308.16369 (chunked prefill during decoding).
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing.decoding import DecodingGpus

PUBLISHED_FILE = Path(__file__).parent / "published_serving.csv"
PUBLISHED_CONCURRENCIES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
# Concurrencies that the plan shows for an engine.
SHOWN_CONCURRENCIES = (1, 16, 64, 256)
FITTED_TO = "fitted to GLM-5 in FP8 by vLLM 0.16 on eight B200"
# vLLM, vllm/engine/arg_utils.py: tokens per step of a server on a GPU with 70 GiB or more.
TOKEN_BUDGET = 8192
# "Peak burst throughput" of the guide for GLM-5 with vLLM on B200, tokens per second of the whole server.
PUBLISHED_BURST = 5114.0


@dataclass(frozen=True)
class ServingRates:
    """Fitted rates of a step that no data sheet states.

    Args:
        layer_seconds: Time of a layer that is independent of the bytes.
        memory_share: Share of the memory bandwidth.
        prefill_share: Share of the BF16 peak.
    """

    layer_seconds: float
    memory_share: float
    prefill_share: float


# Fitted on the rows of 1 and 16 clients (output tokens per second, TTFT, TPOT) of `published_serving.csv`: GLM-5 in FP8
# on eight B200. The share of the bandwidth came out at its bound. A test fits them again.
FITTED = ServingRates(layer_seconds=217e-6, memory_share=1.0, prefill_share=0.0665)


@dataclass(frozen=True)
class Load:
    """Requests of the clients.

    Args:
        input_tokens: Tokens of every prompt.
        output_tokens: Tokens of every response.
        requests_per_client: Requests of each client. The published table does not state it; five matches its rows of 1
            and 16 clients best.
    """

    input_tokens: int = 2048
    output_tokens: int = 512
    requests_per_client: int = 5

    @property
    def tokens(self) -> int:
        """Tokens of a finished request."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class ServedRow:
    """One row of a concurrency table, measured or predicted.

    Args:
        concurrency: Number of clients.
        output_tokens_per_second: Tokens of all responses divided by the time from the first request to the last token.
        ttft_ms: Mean time from a request to its first token.
        tpot_ms: Mean time between the tokens of a response.
        itl_p99_ms: 99th percentile of the time between two tokens.
    """

    concurrency: int
    output_tokens_per_second: float
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float


def published_rows() -> list[ServedRow]:
    """Return the table of `published_serving.csv`: GLM-5 in FP8 by vLLM 0.16 on eight B200."""
    with PUBLISHED_FILE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [ServedRow(int(row.pop("concurrency")), **{key: float(value) for key, value in row.items()}) for row in rows]


def predict_serving(
    engine: DecodingGpus,
    pool_tokens: int,
    concurrencies: Sequence[int] = PUBLISHED_CONCURRENCIES,
    load: Load | None = None,
    rates: ServingRates = FITTED,
) -> list[ServedRow]:
    """Return a row for each concurrency.

    Args:
        engine: The serving engine.
        pool_tokens: Capacity of the whole engine's cache in tokens.
        concurrencies: Numbers of clients.
        load: The clients' requests; by default those of the published table.
        rates: Constants of a step.

    Raises:
        ValueError: The cache cannot hold one request.
    """
    load = load or Load()
    if pool_tokens < load.tokens:
        raise ValueError(f"{pool_tokens} tokens of cache: no room for {load.input_tokens} + {load.output_tokens}")
    roofline = _Roofline(engine, rates, load.input_tokens)
    return [_Serving(roofline, load, clients, pool_tokens).run() for clients in concurrencies]


def is_predicted(arch: Architecture, hardware: Hardware, pool_tokens: int) -> bool:
    """Return whether the fitted constants apply: sparse attention, on GPUs, with enough cache for a request.

    A dense model on one GPU reaches several times GLM-5's share of the peak in prefill.
    """
    return arch.index_n_heads > 0 and hardware.device == "cuda" and pool_tokens >= Load().tokens


class _Roofline:
    """Duration of a step."""

    def __init__(self, engine: DecodingGpus, rates: ServingRates, input_tokens: int):
        arch, hardware = engine.arch, engine.hardware
        self.others, self.experts = engine.weights_bytes()
        self.asleep = 1 - arch.num_experts_per_tok / arch.n_routed_experts if arch.n_routed_experts else 0.0
        self.cache_bytes = engine.cache_bytes
        self.requests_per_gpu = 1 / engine.num_gpus if engine.dp_attention else 1.0
        self.bandwidth = hardware.hbm_gb_per_s * 1e9 * rates.memory_share
        self.fixed = arch.num_hidden_layers * rates.layer_seconds
        flops = sequence_flops(arch, input_tokens).forward / input_tokens
        prefill_gpus = engine.prefill_gpus or engine.num_gpus
        self.token_seconds = flops / (prefill_gpus * hardware.bf16_tflops * 1e12 * rates.prefill_share)

    def step(self, running: int, context: float, prompt_tokens: int = 0) -> float:
        """Return the duration of a step with `running` requests at a mean context."""
        awake = 1 - self.asleep ** (running + prompt_tokens)
        cache = running * self.requests_per_gpu * self.cache_bytes(context)
        read = self.others + self.experts * awake + cache
        decoded = max(read / self.bandwidth, running * self.token_seconds)
        return max(self.fixed + decoded + prompt_tokens * self.token_seconds, running / PUBLISHED_BURST)


@dataclass
class _Requests:
    """A group of requests that arrived together and are at the same token.

    Args:
        count: Number of requests.
        came: Time at which they were sent.
        done: Number of tokens generated so far.
        first_token: Time of the first token; kept when they are preempted and restart.
    """

    count: int
    came: float
    done: int = 0
    first_token: float | None = None

    def split(self, count: int) -> _Requests:
        """Remove some requests, and return them."""
        self.count -= count
        return replace(self, count=count)


@dataclass
class _Serving:
    """Simulation of one row: single engine steps while there are prompts, otherwise many at once until a change."""

    roofline: _Roofline
    load: Load
    clients: int
    room: int  # cache capacity in tokens
    clock: float = 0.0
    held: int = 0  # cache tokens of running requests
    num_running: int = 0
    running: list[_Requests] = field(default_factory=list)
    waiting: deque[_Requests] = field(default_factory=deque)
    started: _Requests | None = None  # one request with a part of its prompt in the cache
    started_tokens: int = 0
    ttft: float = 0.0
    decoding: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)  # between two tokens, and number of waiting requests

    def run(self) -> ServedRow:
        """Serve all requests."""
        total = self.clients * self.load.requests_per_client
        unsent = total - self.clients
        self.waiting.append(_Requests(self.clients, 0.0))
        while self.waiting or self.running or self.started:
            prompts, tokens = ([], 0) if self._throw_out() else self._take_prompts()
            self._pass(prompts, tokens)
            if again := min(self._end(), unsent):
                self.waiting.append(_Requests(again, self.clock))
                unsent -= again
        return ServedRow(
            self.clients,
            total * self.load.output_tokens / self.clock,
            1e3 * self.ttft / total,
            1e3 * self.decoding / total / max(self.load.output_tokens - 1, 1),
            1e3 * _percentile(self.gaps, 0.99),
        )

    @property
    def _free(self) -> int:
        return self.room - self.held - self.started_tokens

    def _context(self, requests: _Requests) -> int:
        return self.load.input_tokens + requests.done

    def _throw_out(self) -> bool:
        """Preempt the newest requests when the next tokens have no room; they restart."""
        thrown = False
        while self._free < self.num_running:
            thrown = True
            if self.started:
                self.waiting.appendleft(self.started)
                self.started, self.started_tokens = None, 0
                continue
            last = self.running[-1]
            self.waiting.appendleft(last.split(1))
            self.held -= self._context(last)
            self.num_running -= 1
            if not last.count:
                self.running.pop()
        return thrown

    def _take_prompts(self) -> tuple[list[_Requests], int]:
        """Fill a step with prompts; return the finished ones, and the number of tokens of all."""
        budget, free = max(TOKEN_BUDGET - self.num_running, 0), self._free - self.num_running
        finished, tokens = [], 0
        if self.started:
            tokens = min(budget, self._context(self.started) - self.started_tokens, free)
            self.started_tokens += tokens
            if self.started_tokens == self._context(self.started):
                finished.append(self.started)
                self.started, self.started_tokens = None, 0
        while self.waiting and not self.started and tokens < min(budget, free):
            first = self.waiting[0]
            whole = min(first.count, (min(budget, free) - tokens) // self._context(first))
            if whole:
                finished.append(first.split(whole))
                tokens += whole * self._context(first)
            elif budget <= free:
                self.started, self.started_tokens = first.split(1), budget - tokens
                tokens = budget
            else:
                break
            if not first.count:
                self.waiting.popleft()
        return finished, tokens

    def _pass(self, prompts: Sequence[_Requests], tokens: int) -> None:
        """Advance by one step, or by all identical steps until a request ends or memory runs out."""
        running, steps = self.num_running, 1
        if not tokens:
            ends = self.load.output_tokens - max(requests.done for requests in self.running)
            steps = max(min(ends, self._free // running), 1)
        context = self.held / max(running, 1) + (steps - 1) / 2
        seconds = self.roofline.step(running, context, tokens)
        self.clock += steps * seconds
        self.gaps.append((seconds, steps * running))
        self.held += steps * running
        for requests in self.running:
            requests.done += steps
        for requests in prompts:
            requests.done += 1
            if requests.first_token is None:
                requests.first_token = self.clock
                self.ttft += requests.count * (self.clock - requests.came)
            self.held += requests.count * self._context(requests)
            self.num_running += requests.count
            self.running.append(requests)

    def _end(self) -> int:
        """Remove the finished requests; return their number."""
        ended = [requests for requests in self.running if requests.done >= self.load.output_tokens]
        if not ended:
            return 0
        self.running = [requests for requests in self.running if requests.done < self.load.output_tokens]
        self.decoding += sum(each.count * (self.clock - (each.first_token or 0.0)) for each in ended)
        count = sum(requests.count for requests in ended)
        self.num_running -= count
        self.held -= sum(each.count * self._context(each) for each in ended)
        return count


def _percentile(weighted: Sequence[tuple[float, int]], share: float) -> float:
    """Return the smallest value that is not exceeded by a given share of the weights; 0 without weights."""
    ordered, total = sorted(weighted), sum(weight for _, weight in weighted)
    seen = 0
    for value, weight in ordered:
        seen += weight
        if total and seen >= share * total:
            return value
    return 0.0

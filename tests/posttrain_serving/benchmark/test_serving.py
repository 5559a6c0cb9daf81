"""Rows by hand, and against an endpoint that knows when its tokens left."""

import asyncio
import statistics

import pytest
from tests.support.scripted_endpoint import forget, on_time, scripted_endpoint, sent_times

from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.streaming import CHAT, COMPLETIONS, Endpoint, Timeline
from posttrain_serving.benchmark.serving import (
    MOST_WARM_UP_REQUESTS,
    TOLERANCE_MS,
    TOLERANCE_SHARE,
    Generator,
    Load,
    measure_level,
    summarize_level,
)
from posttrain_serving.benchmark.serving_prompts import random_prompts

TOKENS, CLIENTS, ROUNDS = 128, 8, 2
PROMPTS = random_prompts(16, 1000, seed=1)
# A machine may be busy for a while; a row says when it was.
TRIES = 5
# Each takes as long as the script says; the others say the same of other ways to answer.
SLOW = pytest.mark.faults("slow")


def test_a_row_by_hand():
    lines = [
        Timeline(10.0, [10.1, 10.2, 10.5], output_tokens=5, input_tokens=7, retries=1),
        Timeline(10.2, [10.4, 10.5, 10.6], output_tokens=3, input_tokens=9),
    ]
    level = summarize_level(2, lines, Generator([0.5, 1.5], cpu_seconds=0.012, seconds=0.6))
    assert (level.concurrency, level.num_requests, level.retries) == (2, 2, 1)
    assert level.output_tokens_per_second == pytest.approx(8 / 0.6)
    assert level.ttft_ms == pytest.approx(150)
    # 400 ms for 4 tokens after the first, 200 ms for 2
    assert level.tpot_ms == pytest.approx(100)
    # gaps of 100, 300, 100, 100 ms; numpy's p99 lies 0.97 of the way from the third to the fourth
    assert (level.itl_p50_ms, level.itl_p99_ms) == (pytest.approx(100), pytest.approx(294))
    assert level.latency_ms == pytest.approx(450)
    assert (level.input_tokens, level.tokens_per_chunk) == (8, pytest.approx(8 / 6))
    assert level.generator_cpu_ms_per_chunk == pytest.approx(2)
    assert not level.is_generator_bound


@pytest.mark.parametrize(("lag_ms", "cpu_seconds", "is_bound"), [(2.1, 0, True), (1.9, 0, False), (0, 0.91, True)])
def test_a_generator_that_is_late_or_busy_limits_its_row(lag_ms, cpu_seconds, is_bound):
    lines = [Timeline(0.0, [0.5, 1.0], 2)]
    generator = Generator([lag_ms], cpu_seconds, seconds=1.0)
    # 1 % of 500 ms would be 5: a lag that matters to nobody.
    assert summarize_level(1, lines, generator).is_generator_bound == (is_bound and cpu_seconds > 0)
    lines = [Timeline(0.0, [0.5, 0.51], 2)]
    assert summarize_level(1, lines, generator).is_generator_bound == is_bound


@pytest.mark.parametrize("clients", [1, 4])
def test_the_first_failure_of_a_row_is_told_with_its_address(clients):
    load = Load(4, 1, 0, 0.0, timeout_seconds=20)
    url = "http://127.0.0.1:9"  # nothing listens there
    with pytest.raises(EngineError, match=f"^{url}"):
        asyncio.run(measure_level([Endpoint(url, "m")], lambda row, number: f"{row} {number}", clients, load))


def test_a_response_of_one_token_has_no_time_between_tokens():
    level = summarize_level(1, [Timeline(0.0, [0.2], 1)], Generator([0.0]))
    assert (level.tpot_ms, level.itl_p50_ms, level.itl_p99_ms) == (0, 0, 0)


@pytest.fixture(scope="module")
def address():
    with scripted_endpoint() as url:
        yield url


def measure(address, model, concurrency=CLIENTS, load=None, api=COMPLETIONS):
    def prompt_of(row, number):
        text = f"{row} {number}"
        return [{"role": "user", "content": text}] if api == CHAT else PROMPTS(row, number)

    forget(address)
    load = load or Load(TOKENS, ROUNDS)
    return asyncio.run(measure_level([Endpoint(address, model, api)], prompt_of, concurrency, load))


def on_a_quiet_machine(address, model, api):
    """Return the first row that is right, and what the endpoint knows of it; where none is, the one least late.

    What is late between the endpoint and the generator, on its way through a busy machine, no timer of either sees: it
    makes a time longer now and then. A generator that measures something else is wrong each time.
    """
    found = []
    for _ in range(TRIES):
        with on_time():
            level = measure(address, model, api=api)
        true = sent_times(address, leave_out=min(CLIENTS, MOST_WARM_UP_REQUESTS))
        if not level.is_generator_bound and not deviations(level, true):
            return level, true
        found.append((level, true))
    level, true = min(found, key=lambda row: row[0].generator_lag_ms)
    if level.is_generator_bound:
        pytest.skip(f"the machine was too busy {TRIES} times: a lag of {level.generator_lag_ms:.1f} ms")
    return level, true


def deviations(level, true):
    """Return which of a row's times are not the endpoint's, with both."""
    pairs = {
        "ttft": (level.ttft_ms, statistics.median(true.ttft)),
        "tpot": (level.tpot_ms, statistics.median(true.tpot)),
        "itl_p50": (level.itl_p50_ms, statistics.median(true.gaps)),
        "itl_p99": (level.itl_p99_ms, p99(true.gaps)),
    }
    return {
        name: pair
        for name, pair in pairs.items()
        if abs(pair[0] - pair[1]) > max(TOLERANCE_MS, TOLERANCE_SHARE * pair[1])
    }


def p99(values):
    return statistics.quantiles(values, n=100, method="inclusive")[98]


@pytest.mark.parametrize(
    ("model", "api", "first_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_chunk"),
    [
        # What the script says: 50 ms, then 10 ms, every 25th gap 60 ms; with chunks of four 40 and 90 ms.
        pytest.param("single", COMPLETIONS, 50, 10, 60, 1, marks=SLOW),
        ("batched", COMPLETIONS, 50, 40, 90, 4),
        pytest.param("empty", COMPLETIONS, 50, 10, 60, 1, marks=SLOW),
        ("empty", CHAT, 50, 10, 60, 1),
        # turned away once: 200 ms of waiting belong to the time to the first token
        pytest.param("busy", COMPLETIONS, 250, 10, 60, 1, marks=SLOW),
        ("hangs-up", COMPLETIONS, 250, 10, 60, 1),
    ],
)
def test_times_are_those_of_the_script(address, model, api, first_ms, itl_p50_ms, itl_p99_ms, tokens_per_chunk):
    level, true = on_a_quiet_machine(address, model, api)
    assert not deviations(level, true)
    assert statistics.median(true.ttft) == pytest.approx(first_ms, abs=10), "the endpoint keeps to its script"
    assert statistics.median(true.gaps) == pytest.approx(itl_p50_ms, abs=2)
    assert p99(true.gaps) == pytest.approx(itl_p99_ms, abs=5)
    assert level.tokens_per_chunk == tokens_per_chunk
    assert level.num_requests == CLIENTS * ROUNDS
    assert level.retries == (level.num_requests if first_ms > 50 else 0)


def test_a_crowd_costs_less_than_a_millisecond_per_chunk(address):
    level = measure(address, "crowd", 1024, Load(16, requests_per_client=1))
    assert level.num_requests == 1024
    assert level.generator_cpu_ms_per_chunk < 1.0


def test_a_flood_is_known_to_be_more_than_the_generator_reads(address):
    level = measure(address, "flood", 64, Load(400, requests_per_client=1))
    assert level.is_generator_bound
    assert level.generator_lag_ms > TOLERANCE_MS


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("refuses", "HTTP 500: .*out of order"),
        ("fails-inside", "tells within its answer: .*out of order"),
        ("talks-nonsense", "answers in another way than it should: TypeError"),
        ("ends-early", "answered with 64 of 128 tokens"),
        ("nobody", "HTTP 404: .*no model nobody"),
    ],
)
def test_who_answers_errors_has_no_row(address, model, told):
    with pytest.raises(EngineError, match=told):
        measure(address, model)


def test_who_dies_has_no_row():
    with scripted_endpoint() as url, pytest.raises(EngineError, match="broke off"):
        measure(url, "dies")

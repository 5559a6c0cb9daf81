"""Prediction of serving against a public server's table, and against a simulation of each request by itself."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.optimize import minimize

from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.engine import GIB, kv_tokens
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing.decoding import DecodingGpus
from posttrain.plan.timing.serving_load import (
    FITTED,
    PUBLISHED_BURST,
    PUBLISHED_FILE,
    TOKEN_BUDGET,
    Load,
    ServedRow,
    ServingRates,
    predict_serving,
    published_rows,
)

# What the guide's server reports for its cache.
POOL_GIB, POOL_TOKENS = 64.49, 691_392
FITTED_ON = (1, 16)
MEASURED = ("output_tokens_per_second", "ttft_ms", "tpot_ms")


@pytest.fixture(scope="module")
def engine():
    config = resolve({"model": "glm5", "site": "local", "hardware": "b200"}, Path("config")).config
    return DecodingGpus(config.model.architecture, config.hardware, 8, "fp8", dp_attention=False)


@pytest.fixture(scope="module")
def published():
    return {row.concurrency: row for row in published_rows()}


def test_the_published_table_is_the_guides(published):
    assert published[128] == ServedRow(128, 2132, 3558, 52.93, 569.76)
    assert len(published) == len(list(csv.reader(PUBLISHED_FILE.open()))) - 2 == 9


def test_the_pool_is_the_servers(engine):
    assert kv_tokens(engine.arch, POOL_GIB * GIB) == POOL_TOKENS


def errors(engine, published, rates, load):
    rows = predict_serving(engine, POOL_TOKENS, FITTED_ON, load, rates)
    return sum(
        (getattr(row, key) / getattr(published[row.concurrency], key) - 1) ** 2 for row in rows for key in MEASURED
    )


def fitted(engine, published, requests_per_client):
    load = Load(requests_per_client=requests_per_client)

    def loss(scaled):
        return errors(engine, published, ServingRates(scaled[0] * 1e-4, scaled[1], scaled[2] * 0.1), load)

    bounds, options = [(0.1, 4), (0.2, 1), (0.2, 3)], {"xatol": 1e-4, "fatol": 1e-7}
    return minimize(loss, (2.2, 0.95, 0.7), method="Nelder-Mead", bounds=bounds, options=options)


def test_constants_are_fitted_on_two_rows(engine, published):
    """And so is the number of requests of each client, which the guide does not tell."""
    found = {count: fitted(engine, published, count) for count in (3, 4, 5, 6, 8)}
    best = min(found, key=lambda count: found[count].fun)
    assert best == Load().requests_per_client
    seconds, memory, prefill = found[best].x
    assert seconds * 1e-4 == pytest.approx(FITTED.layer_seconds, rel=5e-3)
    assert memory == pytest.approx(FITTED.memory_share, rel=5e-3)
    assert prefill * 0.1 == pytest.approx(FITTED.prefill_share, rel=5e-3)


def test_the_other_rows_follow(engine, published):
    rows = {row.concurrency: row for row in predict_serving(engine, POOL_TOKENS)}
    off = {
        count: rows[count].output_tokens_per_second / row.output_tokens_per_second - 1
        for count, row in published.items()
    }
    others = {count: error for count, error in off.items() if count not in FITTED_ON}
    assert len(others) == 7
    assert max(map(abs, others.values())) < 0.15
    peak = max(rows.values(), key=lambda row: row.output_tokens_per_second)
    assert peak.output_tokens_per_second / 2132 - 1 == pytest.approx(-0.03, abs=0.005), "within 5 %"
    assert peak.concurrency == 256, "within one doubling of 128"
    # From 0.2 to 175 seconds; of 8 clients the guide has more than of 16.
    ttft = [rows[count].ttft_ms / row.ttft_ms for count, row in published.items() if count != 8]
    assert 0.75 < min(ttft) < max(ttft) < 1.06
    assert [row.itl_p99_ms > 400 for row in rows.values()] == [False] * 3 + [True] * 6


def test_a_step_is_a_roofline(engine):
    """One client, one request: a prompt alone, and then steps that read the weights that one token needs."""
    load = Load(input_tokens=1024, output_tokens=2, requests_per_client=1)
    rates = ServingRates(1e-4, 0.5, 0.25)
    (row,) = predict_serving(engine, POOL_TOKENS, (1,), load, rates)
    others, experts = engine.weights_bytes()
    peak, bandwidth = 8 * 2250e12 * 0.25, 8000e9 * 0.5
    prompt = sequence_flops(engine.arch, 1024).forward / peak + (others + experts) / bandwidth
    assert row.ttft_ms == pytest.approx(1e3 * (78 * 1e-4 + prompt), rel=1e-6)
    read = others + experts * 8 / 256 + engine.cache_bytes(1025)
    assert row.tpot_ms == pytest.approx(1e3 * (78 * 1e-4 + read / bandwidth), rel=1e-6)


def test_no_step_gives_tokens_faster_than_the_published_burst(engine):
    """200 requests that decode together, with everything else for nothing."""
    (row,) = predict_serving(engine, POOL_TOKENS, (200,), Load(8, 400, 1), ServingRates(1e-9, 1e3, 1e3))
    assert row.tpot_ms == pytest.approx(1e3 * 200 / PUBLISHED_BURST, rel=1e-6)


def test_each_gpu_reads_the_cache_of_its_own_requests(engine):
    def tpot(gpus):
        (row,) = predict_serving(gpus, POOL_TOKENS, (8,), Load(64, 64, 1), ServingRates(1e-9, 1.0, 1.0))
        return row.tpot_ms

    apart = replace(engine, dp_attention=True)
    difference = tpot(engine) - tpot(apart)
    weights = engine.weights_bytes()[0] - apart.weights_bytes()[0]
    cache = 7 * engine.cache_bytes(64 + 32.5)
    assert difference == pytest.approx(1e3 * (weights + cache) / 8000e9, rel=0.02)


@pytest.mark.parametrize(
    ("pool", "clients", "load"),
    [
        pytest.param(10**6, 7, Load(2048, 20, 3), id="room for all"),
        pytest.param(2 * 2068 + 900, 5, Load(2048, 20, 3), id="two fit"),
        pytest.param(700, 9, Load(40, 90, 4), id="some are thrown out"),
        pytest.param(131, 6, Load(40, 90, 2), id="one fits"),
        pytest.param(60_000, 5, Load(9000, 10, 2), id="prompts longer than a step"),
    ],
)
def test_requests_that_are_alike_are_counted_as_each_by_itself(engine, pool, clients, load):
    (row,) = predict_serving(engine, pool, (clients,), load)
    expected = each_by_itself(engine, pool, clients, load)
    assert (row.output_tokens_per_second, row.ttft_ms, row.tpot_ms) == pytest.approx(expected, rel=2e-3)


def each_by_itself(engine, pool, clients, load):
    """The same rules, a step at a time and a request at a time."""
    others, experts = engine.weights_bytes()
    token = sequence_flops(engine.arch, load.input_tokens).forward / load.input_tokens
    token /= 8 * 2250e12 * FITTED.prefill_share
    waiting = [{"came": 0.0, "done": 0, "cached": 0, "first": None} for _ in range(clients)]
    unsent, running, clock, ended = clients * (load.requests_per_client - 1), [], 0.0, []
    while waiting or running:
        whole = lambda one: load.input_tokens + one["done"]  # noqa: E731
        decoding = [one for one in running if one["cached"] == whole(one)]
        free = pool - sum(one["cached"] for one in running)
        thrown = False
        while free < len(decoding):
            last, thrown = running.pop(), True
            free += last["cached"]
            decoding = [one for one in decoding if one is not last]
            waiting.insert(0, {**last, "cached": 0})
        budget, free, prompts = TOKEN_BUDGET - len(decoding), free - len(decoding), 0
        for one in [] if thrown else [*(one for one in running if one not in decoding), *waiting]:
            piece = min(budget - prompts, whole(one) - one["cached"])
            if piece <= 0 or piece > free - prompts:
                break
            if one in waiting:
                waiting.remove(one)
                running.append(one)
            one["cached"] += piece
            prompts += piece
        awake = 1 - (1 - 8 / 256) ** (len(decoding) + prompts)
        read = others + experts * awake + sum(engine.cache_bytes(one["cached"]) for one in decoding)
        roofline = 78 * FITTED.layer_seconds + max(read / 8000e9, len(decoding) * token) + prompts * token
        clock += max(roofline, len(decoding) / PUBLISHED_BURST)
        for one in list(running):
            if one["cached"] == whole(one):
                one["done"] += 1
                one["cached"] += 1
                one["first"] = one["first"] or clock
            if one["done"] == load.output_tokens:
                running.remove(one)
                ended.append((one["first"] - one["came"], (clock - one["first"]) / (load.output_tokens - 1)))
                if unsent:
                    unsent -= 1
                    waiting.append({"came": clock, "done": 0, "cached": 0, "first": None})
    count = clients * load.requests_per_client
    assert len(ended) == count
    return count * load.output_tokens / clock, *(1e3 * sum(times) / count for times in zip(*ended, strict=True))


def test_a_cache_without_room_for_a_request_is_refused(engine):
    with pytest.raises(ValueError, match="2559 tokens of cache: no room for 2048 \\+ 512"):
        predict_serving(engine, 2559)

"""Decoding with and without drafts, against sums made by hand."""

import dataclasses

import pytest

from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing import attainable, rates
from posttrain.plan.timing.decoding import accepted_tokens, decode_step_seconds, rollout_time, speculation_gain
from posttrain.plan.timing.rollout_of_step import engine_of


@pytest.fixture
def plain(resolved):
    return engine_of(resolved("glm5").config)


@pytest.fixture
def drafting(resolved):
    return engine_of(resolved("glm5", set="engine.mtp_steps=3").config)


def test_accepted_tokens_are_those_that_were_measured():
    """2.99 of GLM-5.2 with three drafts; without a draft one token, with certain ones all."""
    assert accepted_tokens(3) == pytest.approx(2.99, abs=0.005)
    assert (accepted_tokens(0), accepted_tokens(3, 1.0), accepted_tokens(3, 0.0)) == (1.0, 4.0, 1.0)


def test_drafted_tokens_read_their_own_latents_and_the_indexers_keys_once(drafting):
    """Three more times 2,048 latents of 576 BF16 elements in 78 layers."""
    more = drafting.cache_bytes(16_000, 4) - drafting.cache_bytes(16_000)
    assert more == pytest.approx(3 * 78 * 2048 * 576 * 2)


def test_a_step_with_drafts_by_hand(plain, drafting):
    """One request: 4 tokens reach 1 - (31 / 32)^4 of the experts; three drafts read a layer and the output matrix."""
    bandwidth = plain.hardware.hbm_gb_per_s * 1e9 * rates.MEMORY_SHARE
    others, experts = drafting.weights_bytes()
    layer, layer_experts = drafting.draft_bytes()
    assert layer_experts == pytest.approx(experts / 75)
    assert 2 * 154880 * 6144 < layer < 2 * 154880 * 6144 + others / 78
    sent = attainable.link(plain.hardware, 64)
    dispatched = 75 / 78 * 8 * 6144 * 3 / 64 / sent
    cache = drafting.cache_bytes(16_000, 4) / 64
    verified = 78 * (rates.LAYER_SECONDS + 4 * dispatched)
    verified += (others + experts * (1 - (31 / 32) ** 4) + cache) / bandwidth
    drafted = rates.LAYER_SECONDS + dispatched + (layer + layer_experts / 32 + cache / 78) / bandwidth
    expected = (verified + 3 * drafted) / accepted_tokens(3)
    assert decode_step_seconds(drafting, 1, 16_000) == pytest.approx(expected, rel=1e-9)


def test_speculation_gains_most_in_the_tail_and_nothing_where_products_are_the_limit(drafting):
    gains = [speculation_gain(drafting, requests, 16_000) for requests in (1, 1024, 100_000)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2 > gains[1] > 1 > gains[2]


def test_a_rollout_gains_no_more_than_was_measured_of_rl_steps(plain, drafting):
    seconds = [rollout_time(engine, 64, 0, 8192, 0.7).seconds for engine in (plain, drafting)]
    assert seconds[0] / seconds[1] == pytest.approx(rates.MOST_SPECULATION_GAIN)
    crowded = [rollout_time(engine, 100_000, 0, 8192, 0.7).seconds for engine in (plain, drafting)]
    assert crowded[1] > crowded[0] / rates.MOST_SPECULATION_GAIN


def test_copies_to_experts_take_as_long_as_deepeps(plain):
    """128 tokens a rank of EP64 travel for 173 + 314 us (DeepEP's README, hidden size 7,168)."""
    arch = dataclasses.replace(plain.arch, hidden_size=7168, first_k_dense_replace=0)
    hardware = dataclasses.replace(plain.hardware, bf16_tflops=1e6)  # so that bytes decide
    engine = dataclasses.replace(plain, arch=arch, hardware=hardware)
    others, experts = engine.weights_bytes()
    read = others + experts * (1 - (31 / 32) ** 8192) + 128 * engine.cache_bytes(0)
    bandwidth = hardware.hbm_gb_per_s * 1e9 * rates.MEMORY_SHARE
    dispatched = decode_step_seconds(engine, 8192, 0) - 78 * rates.LAYER_SECONDS - read / bandwidth
    assert dispatched == pytest.approx(78 * (173e-6 + 314e-6), rel=0.05)


def test_products_bound_a_step_of_very_many_requests(plain):
    """A million requests without a cache: their operations by the rate of products, where nothing is sent."""
    engine = dataclasses.replace(plain, dp_attention=False)
    work = 1_000_000 * sequence_flops(plain.arch, 1).forward / 64
    expected = 78 * rates.LAYER_SECONDS + work / (794.5 / 989 * plain.hardware.bf16_tflops * 1e12)
    assert decode_step_seconds(engine, 1_000_000, 0) == pytest.approx(expected, rel=1e-9)

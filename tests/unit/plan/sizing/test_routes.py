"""What routes of tokens take, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from posttrain.config.schema import Config
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.memory_phases import phase_memory
from posttrain.plan.sizing.routes import engine_routes_bytes, stored_routes_bytes
from posttrain.plan.sizing.storage import storage

REPLAY = "algorithm.routing_replay=true"


def test_an_engine_of_glm5(resolved) -> None:
    """64 GPUs prefill 131,072 tokens at a time, each through 8 experts and the shared one of 78 layers."""
    config = resolved("glm5", set=REPLAY).config
    tokens = engine_memory(config).kv_tokens_per_gpu
    assert tokens
    at_once, host = engine_routes_bytes(config, tokens)
    assert at_once == 2048 * config.engine.gpus_per_engine * 78 * 9 * 4
    assert host == tokens * 2496
    for row in phase_memory(config):
        assert row.gpu["engine_routes"] == at_once / GIB, "it stays while the engine sleeps"
        assert row.host["engine_routes"] == host / GIB


@pytest.mark.parametrize("change", ["", "rollout.max_response_tokens=1024"])
def test_nothing_where_nobody_asks(resolved, change: str) -> None:
    config = resolved("glm5", set=change).config
    assert storage(config).kept_routes == 0
    assert not [row for row in phase_memory(config) if "engine_routes" in {*row.gpu, *row.host}]


def test_rollouts_keep_a_byte_of_each_expert_until_a_checkpoint(resolved) -> None:
    few = "rollout.max_response_tokens=1000 rollout.max_prompt_tokens=24 trainer.save_interval=4"
    config = resolved("glm5", set=f"{REPLAY} {few}").config
    of_step = config.rollout.rollout_batch_size * config.rollout.num_samples_per_prompt * 1024 * 600
    assert stored_routes_bytes(config, ASSUMPTIONS) == 5 * of_step == storage(config).kept_routes
    kept = resolved("glm5", set=f"{REPLAY} {few} logging.keep_rollouts=true training.num_steps=7").config
    assert storage(kept).kept_routes == 7 * of_step
    assert storage(kept).run_bytes - storage(config).run_bytes == 2 * of_step


def changed(config: Config, section: str, **values: int) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def test_an_engine_keeps_routes_of_whatever_it_takes_at_once(resolved) -> None:
    config = resolved("glm5", set=REPLAY).config
    of_token = 78 * 9 * 4
    assert engine_routes_bytes(config, None) == engine_routes_bytes(config, 0) == (0, 0)
    assert engine_routes_bytes(resolved("glm5").config, 1000) == (0, 0)
    assert engine_routes_bytes(config, 1) == (2048 * config.engine.gpus_per_engine * of_token, 78 * 8 * 4)
    kernels = dataclasses.replace(config.hardware.kernels, chunked_prefill_tokens=4096)
    own = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, kernels=kernels))
    assert engine_routes_bytes(own, 1)[0] == 4096 * of_token
    assert engine_routes_bytes(changed(own, "engine", max_running_requests=5000), 1)[0] == 5000 * of_token


@pytest.mark.parametrize(("experts", "number"), [(255, 1), (256, 1), (257, 2)])
def test_a_number_of_more_than_256_takes_two_bytes(resolved, experts: int, number: int) -> None:
    config = resolved("glm5", set=f"{REPLAY} rollout.max_response_tokens=1000 rollout.max_prompt_tokens=24").config
    config = changed(changed(config, "trainer", save_interval=20), "training", num_steps=3)
    arch = dataclasses.replace(config.model.architecture, n_routed_experts=experts)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=arch))
    of_step = config.rollout.rollout_batch_size * config.rollout.num_samples_per_prompt * 1024 * 75 * 8
    assert stored_routes_bytes(config, ASSUMPTIONS) == 3 * of_step * number, "no more steps than there are"

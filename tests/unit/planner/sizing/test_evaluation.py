"""Sizes by hand: GLM-5 has 75 MoE layers of 256 experts of 3 x 6144 x 2048 weights, 1,350 GiB in BF16, 675 in FP8."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.planner.resolve import resolve
from posttrain.planner.sizing.evaluation import (
    evaluates_fp8,
    evaluation_nodes,
    quantises_for_engines,
    serving_on_one_node,
)

CONFIG_DIR = Path(__file__).parents[4] / "config"


def config_of(model: str, hardware: str, **workflow: object) -> Config:
    return resolve({"model": model, "hardware": hardware, "site": "local", **workflow}, CONFIG_DIR).config


@pytest.mark.parametrize(
    ("model", "hardware", "nodes"),
    [
        ("tiny", "cpu", 1),
        # 8 GPUs hold 168.75 GiB of experts each, 24 of them 56.25 and what is not cut: 98.7 GiB is the limit on H200.
        ("glm5", "h200", 3),
        ("glm5", "b200", 2),
        ("glm5_4layer", "h200", 1),
        ("glm4.5_air", "h200", 1),
        ("qwen3_30b_a3b", "h100", 1),
    ],
)
def test_nodes_of_an_evaluation(model: str, hardware: str, nodes: int) -> None:
    """In FP8 one node holds each of them."""
    assert evaluation_nodes(config_of(model, hardware, set="evaluation.precision=source")) == nodes
    config = config_of(model, hardware)
    assert evaluation_nodes(config) == 1
    assert evaluates_fp8(config) == serving_on_one_node(config).rollout.fp8 == (nodes > 1)


@pytest.mark.parametrize(
    ("model", "hardware", "words", "expected"),
    [
        ("glm5", "h200", "rollout.fp8=false", False),
        ("glm5", "h200", "rollout.fp8=false evaluation.precision=fp8", True),
        ("tiny", "cpu", "evaluation.precision=fp8", True),
        # 84 GiB of experts each: two nodes in FP8, too, so it stays what it is and is refused.
        ("glm5", "h100", "evaluation.precision=auto", False),
    ],
)
def test_the_precision_of_an_evaluation(model: str, hardware: str, words: str, expected: bool) -> None:
    config = config_of(model, hardware, set=words)
    assert evaluates_fp8(config) is expected
    assert quantises_for_engines(config) is (config.rollout.fp8 or expected)


def test_engines_grow_until_they_hold_the_weights_of_the_source() -> None:
    """Two H200 hold GLM-4.5-Air in FP8; in BF16 it takes 4."""
    config = config_of(
        "glm4.5_air", "h200", set="engine.gpus_per_engine=2 engine.num_engines=16 engine.mem_fraction_static=0.7"
    )
    assert config.engine.gpus_per_engine == 2
    served = serving_on_one_node(config)
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 4, 2)


def test_an_engine_over_several_nodes_gets_one() -> None:
    served = serving_on_one_node(config_of("glm5", "h200"))
    assert served.rollout.fp8
    assert not served.engine.dp_attention, "a copy of attention on each GPU is 15 GiB more, of which 10 are there"
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 8, 1)
    assert served.engine.pd.num_prefill_engines == 0


def test_a_cpu_serves_as_it_trains() -> None:
    config = config_of("tiny", "cpu")
    served = serving_on_one_node(config)
    assert config.rollout.fp8
    awake = dataclasses.replace(config.engine, sleep="never")
    assert dataclasses.replace(config, rollout=served.rollout, engine=awake) == served
    assert dataclasses.replace(config.rollout, fp8=False) == served.rollout, "it serves what is evaluated"

"""Sizes by hand: GLM-5 has 75 MoE layers of 256 experts of 3 x 6144 x 2048 weights, 1,350 GiB in BF16, 675 in FP8."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.evaluation import (
    evaluates_fp8,
    evaluation_nodes,
    quantises_for_engines,
    serving_config,
)

CONFIG_DIR = Path(__file__).parents[4] / "config"


def config_of(model: str, hardware: str, **workflow: object) -> Config:
    return resolve({"model": model, "hardware": hardware, "site": "local", **workflow}, CONFIG_DIR).config


@pytest.mark.parametrize(
    ("model", "hardware", "nodes"),
    [
        ("tiny", "cpu", 1),
        # 16 GPUs hold 84.4 GiB of experts each; with attention cut the rest fits, too: 98.7 GiB is the limit on H200.
        ("glm5", "h200", 2),
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
    assert evaluates_fp8(config) == serving_config(config).rollout.fp8 == (nodes > 1)


@pytest.mark.parametrize(
    ("model", "hardware", "words", "expected"),
    [
        ("glm5", "h200", "rollout.fp8=false", False),
        ("glm5", "h200", "rollout.fp8=false evaluation.precision=fp8", True),
        ("tiny", "cpu", "evaluation.precision=fp8", True),
        # two nodes, where the source's precision would take four
        ("glm5", "h100", "evaluation.precision=auto", True),
        ("glm5", "h100", "rollout.fp8=false evaluation.precision=auto", False),
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
    served = serving_config(config)
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 4, 2)


@pytest.mark.parametrize(
    ("model", "hardware", "words", "nodes", "dp_attention"),
    [
        # 24 GPUs would hold a copy of attention each; 256 experts and 64 heads are not cut into 24 parts.
        ("glm5", "h200", "evaluation.precision=source", 2, False),
        ("glm5", "b200", "evaluation.precision=source", 2, True),
        ("glm5", "h100", "rollout.fp8=false", 4, False),
        # GPUs of 4 to a node
        ("glm5", "gb300", "evaluation.precision=source", 2, False),
        # 16 parts of a shared expert are FP8 blocks, 32 are less: from there on attention is copied, or nothing fits
        ("glm5", "h100", "evaluation.precision=fp8", 2, False),
        ("glm5", "h100", "evaluation.precision=fp8 engine.mem_fraction_static=0.3", 32, True),
        ("glm5", "h100", "evaluation.precision=fp8 engine.mem_fraction_static=0.1", 0, False),
    ],
)
def test_one_engine_over_the_fewest_nodes_that_can_cut_the_model(
    model: str, hardware: str, words: str, nodes: int, dp_attention: bool
) -> None:
    config = config_of(model, hardware, set=words)
    assert evaluation_nodes(config) == nodes
    served = serving_config(config)
    if not nodes:  # one that does not fit is told by its rule
        assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 8, 1)
        assert served.engine.dp_attention
    else:
        assert (served.nodes, served.engine.num_engines) == (nodes, 1)
        assert served.engine.gpus_per_engine == nodes * config.hardware.gpus_per_node
        assert served.engine.dp_attention is dp_attention


def test_engines_grow_to_a_whole_node_and_no_further() -> None:
    """16 GPUs of one node hold GLM-5 in BF16, with attention cut."""
    config = config_of("glm5", "h200", set="evaluation.precision=source")
    hardware = dataclasses.replace(config.hardware, gpus_per_node=16)
    engine = dataclasses.replace(config.engine, gpus_per_engine=2)
    served = serving_config(dataclasses.replace(config, hardware=hardware, engine=engine))
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 16, 1)
    assert not served.engine.dp_attention


def test_an_engine_over_several_nodes_gets_one() -> None:
    served = serving_config(config_of("glm5", "h200"))
    assert served.rollout.fp8
    assert not served.engine.dp_attention, "a copy of attention on each GPU is 15 GiB more, of which 10 are there"
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 8, 1)
    assert served.engine.pd.num_prefill_engines == 0


def test_ranks_of_an_engine_on_cpus_span_nodes() -> None:
    config = config_of("tiny", "cpu", set="engine.kind=sglang engine.gpus_per_engine=4 hardware.gpus_per_node=4")
    spread = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, gpus_per_node=2))
    assert (evaluation_nodes(config), evaluation_nodes(spread)) == (1, 2)
    served = serving_config(dataclasses.replace(spread, nodes=4))
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (2, 4, 1)


def test_a_cpu_serves_as_it_trains() -> None:
    config = config_of("tiny", "cpu")
    served = serving_config(config)
    assert config.rollout.fp8
    awake = dataclasses.replace(config.engine, sleep="never")
    assert dataclasses.replace(config, rollout=served.rollout, engine=awake) == served
    assert dataclasses.replace(config.rollout, fp8=False) == served.rollout, "it serves what is evaluated"

"""Sizes by hand: GLM-5 has 75 MoE layers of 256 experts of 3 x 6144 x 2048 weights, 1,350 GiB in BF16."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.planner.resolve import resolve
from posttrain.planner.sizing.evaluation import evaluation_nodes, serving_on_one_node

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
    assert evaluation_nodes(config_of(model, hardware)) == nodes


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
    assert (served.nodes, served.engine.gpus_per_engine, served.engine.num_engines) == (1, 8, 1)
    assert served.engine.pd.num_prefill_engines == 0


def test_a_cpu_serves_as_it_trains() -> None:
    config = config_of("tiny", "cpu")
    assert serving_on_one_node(config) == config

"""Every engine runs somewhere, once, and engines on GPUs share none."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cluster.placement import EnginePart, engines_on_node
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


def parts(model: str, nodes: int, settings: str) -> list[list[EnginePart]]:
    config = resolve({"model": model, "nodes": nodes, "site": "example_slurm", "set": settings}, CONFIG_DIR).config
    return [engines_on_node(config, node) for node in range(nodes)]


@pytest.mark.parametrize(("nodes", "engines", "per_node"), [(4, 4, [1, 1, 1, 1]), (2, 5, [3, 2]), (4, 2, [1, 0, 1, 0])])
def test_engines_on_cpus_are_spread(nodes: int, engines: int, per_node: list[int]) -> None:
    found = parts("tiny", nodes, f"engine.num_engines={engines}")
    assert [len(node) for node in found] == per_node
    assert [part.index for node in found for part in node] == list(range(engines))


def test_ranks_of_engines_on_cpus_may_span_nodes() -> None:
    words = "engine.kind=sglang engine.gpus_per_engine=2 engine.num_engines=3"
    found = parts("tiny", 4, words)
    assert [[(part.index, part.node_rank, part.first_node) for part in node] for node in found] == [
        [(0, 0, 0), (1, 0, 0)],
        [(0, 1, 0), (1, 1, 0)],
        [(2, 0, 2)],
        [(2, 1, 2)],
    ]
    beside = parts("tiny", 2, f"{words} hardware.gpus_per_node=2 engine.own_nodes=1")
    assert [[part.index for part in node] for node in beside] == [[], [0, 1, 2]]


def test_engines_smaller_than_a_node_get_gpus_of_their_own() -> None:
    found = parts("glm5_4layer", 2, "hardware.gpus_per_node=8 engine.gpus_per_engine=4 engine.num_engines=3")
    assert [[(part.index, part.gpus) for part in node] for node in found] == [
        [(0, (0, 1, 2, 3)), (1, (4, 5, 6, 7))],
        [(2, (0, 1, 2, 3))],
    ]


def test_an_engine_over_several_nodes_has_one_first_node() -> None:
    found = parts("glm5", 16, "engine.pd.num_prefill_engines=0 engine.gpus_per_engine=64 engine.num_engines=2")
    assert [(part.index, part.node_rank, part.first_node) for (part,) in found] == [
        *((0, rank, 0) for rank in range(8)),
        *((1, rank, 8) for rank in range(8)),
    ]
    assert all(part.gpus == tuple(range(8)) for (part,) in found)


def test_engines_that_prefill_have_the_first_gpus_and_the_last_numbers() -> None:
    found = parts("glm5", 16, "engine.pd.num_prefill_engines=1")
    assert [(part.index, part.role, part.node_rank, part.first_node) for (part,) in found] == [
        *((1, "prefill", rank, 0) for rank in range(8)),
        *((0, "decode", rank, 8) for rank in range(8)),
    ]
    small = "hardware.gpus_per_node=8 engine.num_engines=1 engine.gpus_per_engine=4 "
    found = parts("qwen3_4b", 1, small + "engine.pd.num_prefill_engines=2 engine.pd.gpus_per_prefill_engine=2")
    assert [(part.index, part.role, part.gpus) for part in found[0]] == [
        (1, "prefill", (0, 1)),
        (2, "prefill", (2, 3)),
        (0, "decode", (4, 5, 6, 7)),
    ]
    found = parts("tiny", 2, "engine.kind=sglang engine.num_engines=2 engine.pd.num_prefill_engines=1")
    assert [[(part.index, part.role) for part in node] for node in found] == [
        [(0, "decode"), (1, "decode")],
        [(2, "prefill")],
    ]


def test_engines_of_their_own_nodes_are_on_no_other() -> None:
    found = parts("tiny", 5, "engine.own_nodes=2 engine.num_engines=3")
    assert [[part.index for part in node] for node in found] == [[], [], [], [0, 1], [2]]
    found = parts("glm5", 24, "engine.own_nodes=8")
    assert [(node, part.index, part.node_rank, part.first_node) for node in range(24) for part in found[node]] == [
        (16 + node, node // 2, node % 2, 16 + node // 2 * 2) for node in range(8)
    ]

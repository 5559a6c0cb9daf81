"""Parts of an engine that spans nodes."""

from __future__ import annotations

from pathlib import Path

from posttrain.cluster.node_engines import NodeEngines
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports

CONFIG_DIR = Path(__file__).parents[3] / "config"


def test_parts_meet_at_the_first_node_and_only_that_one_answers() -> None:
    """Also where all nodes are one host."""
    words = "engine.kind=sglang engine.gpus_per_engine=2 engine.num_engines=2"
    config = resolve({"model": "tiny", "site": "example_slurm", "nodes": 2, "set": words}, CONFIG_DIR).config
    first_port = choose_free_ports(1)[0]
    nodes = [NodeEngines(config, rank, [LOOPBACK, LOOPBACK], first_port) for rank in (0, 1)]
    parts = [of_node.commands(Path("/model")) for of_node in nodes]
    given = [[dict(zip(part[i].argv, part[i].argv[1:], strict=False)) for i in (0, 1)] for part in parts]
    assert [[flags["--node-rank"] for flags in node] for node in given] == [["0", "0"], ["1", "1"]]
    assert all(flags["--nnodes"] == flags["--tp-size"] == "2" for node in given for flags in node)
    meetings = [[flags["--dist-init-addr"] for flags in node] for node in given]
    assert meetings[0] == meetings[1]
    assert len({*meetings[0]}) == 2
    assert nodes[0].urls == {i: parts[0][i].url for i in (0, 1)}
    assert nodes[1].urls == {}
    assert not nodes[0].alone | nodes[1].alone
    assert parts[1][0].url != parts[0][0].url

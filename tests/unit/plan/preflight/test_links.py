"""What lies between nodes, measured by real processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations

import pytest

from posttrain.plan.preflight.links import MAX_ROUNDS, rounds
from posttrain.rl.engines.ports import choose_free_ports


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 16, MAX_ROUNDS + 1])
def test_every_two_nodes_meet_once(num_nodes: int) -> None:
    met = []
    for partners in rounds(num_nodes):
        assert all(partners[partners[node]] == node for node in range(num_nodes))
        met += [(node, other) for node, other in enumerate(partners) if node < other]
    assert sorted(met) == list(combinations(range(num_nodes), 2))


def test_many_nodes_meet_some() -> None:
    partners = list(rounds(128))
    assert len(partners) == MAX_ROUNDS
    assert all(len({row[node] for row in partners}) == MAX_ROUNDS for node in range(128))


def test_three_nodes_exchange_and_add() -> None:
    (port,) = choose_free_ports(1)
    command = [sys.executable, "-m", "posttrain.plan.preflight.links", "--device", "cpu", "--num-nodes", "3"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    for rank, output in enumerate(outputs):
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert sorted(row["partner"] for row in rows if "rate" in row) == sorted({0, 1, 2} - {rank})
        assert all(row["rate"] > 1.0 for row in rows if "rate" in row), "MB/s"
        assert rows[0]["compute"] > 0
        assert rows[-1]["all_reduce"] > 1.0

"""Real ranks that meet: in a file, and at one address."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.megatron_single import free_port, run_ranks

RANK = """
import json, os, sys
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from posttrain.cluster.rendezvous import join_ranks

os.environ |= json.loads(sys.argv[1]) | {"GLOO_SOCKET_IFNAME": "lo"}
join_ranks("gloo", timedelta(seconds=60))
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
listening = [list(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
dist.barrier()
print(json.dumps({"total": total.item(), "listening": listening}))
"""


def rendezvous(tmp_path: Path, environment: dict[str, str]) -> list[dict]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    outputs = run_ranks(script, 2, json.dumps(environment), timeout=60)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_ranks_of_one_machine_meet_in_a_file(tmp_path: Path) -> None:
    """What is left is gloo's own listener, one for the one group of ranks."""
    ranks = rendezvous(tmp_path, {"POSTTRAIN_RANKS_MEET_IN": str(tmp_path / "meeting"), "MASTER_PORT": "none"})
    assert [rank["total"] for rank in ranks] == [3.0, 3.0]
    assert [len(rank["listening"]) for rank in ranks] == [1, 1]
    assert {host for rank in ranks for host, _ in rank["listening"]} == {"127.0.0.1"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers at all of 127.0.0.0/8")
def test_ranks_of_several_nodes_meet_at_one_address(tmp_path: Path) -> None:
    """127.0.0.2 stands for a node's own address: who listens there listens nowhere else."""
    port = free_port()
    first, second = rendezvous(tmp_path, {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)})
    assert (first["total"], second["total"]) == (3.0, 3.0)
    assert [host for host, at in first["listening"] if at == port] == ["127.0.0.2"]
    assert {host for rank in (first, second) for host, _ in rank["listening"]} == {"127.0.0.1", "127.0.0.2"}
    assert (len(first["listening"]), len(second["listening"])) == (2, 1)

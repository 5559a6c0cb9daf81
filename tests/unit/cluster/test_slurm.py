"""What a SLURM allocation says without SLURM; with a real one: tests/slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cluster.nodes import LOOPBACK, NodesLostError, interface_address
from posttrain.cluster.site import find_nodes
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.cluster.slurm_query import job_is_alive
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


def allocation(names: str, settings: str = "site.network_interface=lo", job_id: str = "123") -> SlurmAllocation:
    config = resolve({"model": "tiny", "site": "example_slurm", "set": settings}, CONFIG_DIR).config
    return SlurmAllocation(job_id, names.split(), config, Path())


def test_the_first_nodes_train_and_the_others_are_spare() -> None:
    nodes = allocation("a b c")
    assert nodes.choose(2) == ["a", "b"]
    assert nodes.choose(3) == ["a", "b", "c"]
    with pytest.raises(NodesLostError, match="training needs 4 nodes, and 3 of the job's 3 are left"):
        nodes.choose(4)


def test_jobs_side_by_side_have_ports_of_their_own() -> None:
    first, second = allocation("a b", job_id="1"), allocation("a b", job_id="2")
    assert abs(first.first_port - second.first_port) == 100
    assert all(20000 <= allocation("a", job_id=str(number)).first_port < 32000 for number in (1, 119, 120, 987654))


def test_a_site_that_forbids_requeueing_gets_instructions() -> None:
    with pytest.raises(RuntimeError, match="give the same command again"):
        allocation("a", "site.slurm.requeue=false").scheduler.requeue()


def test_addresses_of_interfaces() -> None:
    assert allocation("a b").address == interface_address("lo") == LOOPBACK
    with pytest.raises(RuntimeError, match="ib9: no such interface"):
        interface_address("ib9")


def test_a_process_outside_of_a_job_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = resolve({"model": "tiny", "site": "slurm_localhost"}, CONFIG_DIR).config
    with pytest.raises(RuntimeError, match="this is no SLURM job"):
        find_nodes(config, Path())


def test_other_schedulers_jobs_are_not_known() -> None:
    assert job_is_alive("") is None
    assert job_is_alive("kubernetes:7") is None

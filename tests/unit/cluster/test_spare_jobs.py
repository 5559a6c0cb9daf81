"""What the job of a new spare node asks for, and what happens without SLURM; with a real one: tests/slurm."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.cluster.nodes import start_here
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.cluster.slurm_job import options_of_spare
from posttrain.cluster.spare_jobs import parse_jobs
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "/nowhere")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def config_of(*settings: str, **choice: object) -> Config:
    chosen = {"model": "glm5", "nodes": 16, "site": "example_slurm", "set": " ".join(settings), **choice}
    return resolve(chosen, CONFIG_DIR).config


def test_it_asks_for_a_node_like_those_of_training() -> None:
    config = config_of("site.slurm.constraint=nvme", "site.slurm.extra_options=[--reservation=weekend]")
    assert options_of_spare(config, {"n2", "n1"}) == [
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--no-requeue"),
        *("--partition=batch", "--account=myproject", "--constraint=nvme", "--reservation=weekend"),
        *("--exclusive", "--gpus-per-node=8", "--exclude=n1,n2"),
    ]


def test_nodes_that_the_site_excludes_stay_excluded() -> None:
    words = options_of_spare(config_of("site.slurm.extra_options=[--exclude=bad7]"), {"n1"})
    assert [word for word in words if "exclude" in word] == ["--exclude=bad7,n1"]


def test_a_job_that_waits_has_no_node() -> None:
    assert parse_jobs("7|PENDING|\n8|CONFIGURING|n4\n9|RUNNING|n5\n") == {"7": "", "8": "", "9": "n5"}
    assert parse_jobs("") == {}


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [("", True), ("site.slurm.refill_spares=false", False), ("site.slurm.spare_nodes=0", False)],
)
def test_training_goes_on_where_slurm_takes_no_job(
    tmp_path: Path, no_slurm: None, caplog: pytest.LogCaptureFixture, settings: str, is_asked: bool
) -> None:
    names = [f"n{number}" for number in range(17)]
    nodes = SlurmAllocation("7", names, config_of("site.network_interface=lo", settings), tmp_path)
    with caplog.at_level(logging.WARNING):
        nodes.leave_out(["n3"])
    assert ("a used-up spare node is not replaced through the queue: " in caplog.text) == is_asked
    assert nodes.choose(16) == [name for name in names if name != "n3"]
    nodes.scheduler.give_back()


def test_several_that_were_started_together() -> None:
    started = start_here([["sleep", "600"], ["sleep", "600"]], {})
    assert started.is_running()
    started.end()
    assert not started.is_running()


@pytest.mark.parametrize("code", [0, 1])
def test_one_of_several_ends_first(code: int) -> None:
    """Where it has failed, the others cannot end well."""
    started = start_here([[sys.executable, "-c", f"raise SystemExit({code})"], ["sleep", "600"]], {})
    started.processes[0].wait()
    assert started.is_running() == (code == 0)
    started.end()
    assert not started.is_running(), "the other would sleep for ten minutes"

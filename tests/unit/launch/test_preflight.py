"""Several nodes on loopback look at each other before they train; real supervisors, ranks that end at once."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.small_job import STAYS, attempts_of, make_job

from posttrain.config.load import load_resolved
from posttrain.launch import inspection, supervisor
from posttrain.launch.nodes import LocalProcess, NodesLostError, ThisMachine, start_here

HAS_NO_VERSIONS = "[[ $1 == -c ]] && exit 1"


class LoopbackNodes(ThisMachine):
    """Nodes of a job that are all this machine.

    Args:
        names: Theirs.
    """

    def __init__(self, *names: str):
        self.names = list(names)

    def choose(self, count: int) -> list[str]:
        if len(self.names) < count:
            raise NodesLostError(f"{len(self.names)} of {count} nodes are left")
        return self.names[:count]

    def leave_out(self, names: Sequence[str]) -> None:
        self.names = [name for name in self.names if name not in names]

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> LocalProcess:
        each = " ".join(f"{shlex.join([*command, '--name', name])} &" for name in names)
        return start_here(["bash", "-c", f"{each} wait"], environment)


def supervise(folder: Path, *names: str, nodes: int = 2, settings: str = "") -> None:
    job = make_job(folder, f"{HAS_NO_VERSIONS}; {STAYS}", nodes=nodes, more=settings)
    supervisor.supervise(job, load_resolved(job.config_path), LoopbackNodes(*names))


def test_nodes_that_are_alike_are_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    started = time.monotonic()
    supervise(tmp_path, "a", "b")
    assert time.monotonic() - started < 120
    (attempt,) = attempts_of(tmp_path)
    assert (attempt["nodes"], attempt["reason"]) == (["a", "b"], "done")
    found = json.loads((tmp_path / "attempts/001/preflight.json").read_text())
    assert set(found["clocks"]) == set(found["nodes"]) == set(found["links"]) == {"a", "b"}
    assert [row["partner"] for row in found["links"]["a"][0] if "rate" in row] == [1]
    assert "preflight: 2 nodes are fit, after" in caplog.text
    assert "between two nodes" in caplog.text


def test_a_spare_node_takes_the_place_of_an_unfit_one(tmp_path: Path) -> None:
    (tmp_path / "b").touch()  # where the folder of its copies should be
    supervise(tmp_path, "a", "b", "c")
    unfit, done = attempts_of(tmp_path)
    assert unfit["reason"].startswith("b is unfit: node-local disk (site.node_local): ")
    assert (done["nodes"], done["reason"]) == (["a", "c"], "done")


def test_without_a_spare_node_training_ends_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    with pytest.raises(RuntimeError, match="1 of 2 nodes are left; unfit to train:\n  b: node-local disk") as raised:
        supervise(tmp_path, "a", "b")
    assert "remedy: mend them, or site.slurm.extra_options: ['--exclude=b']" in str(raised.value)


def test_a_node_that_does_not_answer_in_time(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no answer within 0\.001 s"):
        supervise(tmp_path, "a", "b", settings="launch.preflight_timeout_seconds=0.001")


def test_one_node_without_gpus_is_not_looked_at(tmp_path: Path) -> None:
    supervise(tmp_path, "a", nodes=1)
    assert not (tmp_path / "attempts/001/preflight.json").exists()


def test_the_preflight_can_be_left_out(tmp_path: Path) -> None:
    supervise(tmp_path, "a", "b", settings="launch.preflight=false")
    assert not (tmp_path / "attempts/001/preflight.json").exists()


def test_clocks_are_told_apart_from_slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(kind: str) -> dict:
        now = time.time()
        time.sleep(0.2)
        return {"right": {"seconds": now + 0.1}, "ahead": {"seconds": now + 60}, "behind": {"seconds": now - 60}}

    offsets = inspection._clock_offsets(ask)
    assert offsets["right"] == 0.0
    assert offsets["ahead"] == pytest.approx(60, abs=1)
    assert offsets["behind"] == pytest.approx(-60, abs=1)

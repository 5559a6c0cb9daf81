"""Several nodes on loopback look at each other before they train; real supervisors, ranks that end at once."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.small_job import STAYS, attempts_of, make_job
from tests.support.workflow_runs import ROOT

from posttrain.cluster import inspection, node_inspection, supervisor
from posttrain.cluster.inspection import Ask
from posttrain.cluster.node_inspection import NodeInspection
from posttrain.cluster.nodes import NodesLostError, StartedHere, ThisMachine, start_here
from posttrain.cluster.preflight import Preflight, look_at_nodes
from posttrain.config.load import load_resolved
from posttrain.config.schema import Config
from posttrain.plan.preflight.node import check_transport
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.ports import LOOPBACK
from posttrain.store import Paths

HAS_NO_VERSIONS = "[[ $1 == -c ]] && exit 1"
# Processes that share a few cores are not equally fast.
ANY_RATE = "launch.preflight_min_share=0"


class LoopbackNodes(ThisMachine):
    """Nodes of a job that are all this machine.

    Args:
        names: Theirs.
        dead: The one of them on which nothing starts.
    """

    def __init__(self, *names: str, dead: str = ""):
        self.names, self.dead = list(names), dead

    def choose(self, count: int) -> list[str]:
        if len(self.names) < count:
            raise NodesLostError(f"{len(self.names)} of {count} nodes are left")
        return self.names[:count]

    def leave_out(self, names: Sequence[str]) -> None:
        self.names = [name for name in self.names if name not in names]

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> StartedHere:
        each = " ".join(f"{shlex.join([*command, '--name', name])} &" for name in names if name != self.dead)
        return start_here([["bash", "-c", f"{each} wait"]], environment)


def supervise(folder: Path, *names: str, nodes: int = 2, settings: str = "") -> None:
    job = make_job(folder, f"{HAS_NO_VERSIONS}; {STAYS}", nodes=nodes, more=f"{ANY_RATE} {settings}")
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
    assert str(raised.value).endswith("\n  remedy: repair them, or launch.preflight=false")


def test_the_words_that_exclude_unfit_nodes_are_the_schedulers() -> None:
    unfit = {"b": ["slow", "late"], "d": ["late"]}
    for site, words in (
        ("example_slurm", "site.slurm.extra_options: ['--exclude=b,d']"),
        ("example_kubernetes", "kubectl cordon b d"),
    ):
        config = resolve({"model": "tiny", "site": site}, ROOT / "config").config
        assert inspection.describe_unfit(unfit, config) == (
            f"unfit to train:\n  b: slow, late\n  d: late\n  remedy: repair them, or {words}"
        )


def test_a_node_that_does_not_answer_in_time(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no answer within 0\.001 s"):
        supervise(tmp_path, "a", "b", settings="launch.preflight_timeout_seconds=0.001")


def test_one_node_without_gpus_is_not_looked_at(tmp_path: Path) -> None:
    supervise(tmp_path, "a", nodes=1)
    assert not (tmp_path / "attempts/001/preflight.json").exists()


def test_the_preflight_can_be_left_out(tmp_path: Path) -> None:
    supervise(tmp_path, "a", "b", settings="launch.preflight=false")
    assert not (tmp_path / "attempts/001/preflight.json").exists()


def look(folder: Path, *names: str, dead: str = "") -> tuple[Preflight, Paths]:
    settings = f"site.results={folder}/results site.node_local={folder}/local launch.node_start_timeout_seconds=15"
    settings += f" {ANY_RATE}"
    paths = Paths(resolve({"model": "tiny", "site": "local", "nodes": len(names), "set": settings}, ROOT / "config"))
    return look_at_nodes(paths, LoopbackNodes(*names, dead=dead)), paths


def test_a_preflight_by_itself_needs_no_weights(tmp_path: Path) -> None:
    found, paths = look(tmp_path, "a", "b")
    assert (found.fit, found.unfit) == (["a", "b"], {})
    written = json.loads(paths.preflight.read_text())
    assert written == found.as_dict()
    assert set(written["links"]) == {"a", "b"}
    assert [finding.status for finding in found.findings()] == ["ok", "ok"]
    assert "between two nodes" in found.findings()[0].detail
    assert not paths.train.exists()


# Over ten seconds: a node that does not start is waited for, longer than a busy machine takes for one that does.
def test_a_preflight_by_itself_finds_what_is_wrong_with_each_node(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "b").touch()  # where the folder of its copies should be
    found, paths = look(tmp_path, "a", "b", "c", "d", dead="c")
    assert found.fit == ["a", "d"]
    assert found.unfit["c"][0].startswith("no supervisor started on c; see ")
    assert found.unfit["b"][0].startswith("node-local disk (site.node_local): ")
    assert {finding.name for finding in found.findings() if finding.problem} == {"b", "c"}
    assert len(list((paths.run / "preflight").iterdir())) == 3


def ask_here(folder: Path, *names: str) -> Ask:
    """Nodes in threads of this process, whose disks are folders."""
    for name in names:
        (folder / "shared" / name).mkdir(parents=True)
    nodes = {name: NodeInspection(name, LOOPBACK, folder / "shared" / name, time.sleep, "secret") for name in names}

    def ask(kind: str, **content: object) -> dict[str, dict]:
        question = {"kind": kind, "names": names, "config_path": "", "node_local": f"{folder}/{{node}}", **content}
        with ThreadPoolExecutor(len(nodes)) as pool:
            return dict(zip(nodes, pool.map(lambda node: node.answer(question), nodes.values()), strict=True))

    return ask


@pytest.fixture
def prefill_apart(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Engines that prefill apart from those that decode, on CPUs, where no configuration has them."""
    require_sglang()
    config = resolve({"model": "tiny", "site": "local", "nodes": 2}, ROOT / "config").config
    pd = dataclasses.replace(config.engine.pd, num_prefill_engines=1, transfer_backend="nixl")
    engine = dataclasses.replace(config.engine, kind="sglang", python=str(PYTHON), pd=pd)
    launch = dataclasses.replace(config.launch, preflight_min_share=0.0)
    config = dataclasses.replace(config, engine=engine, launch=launch)
    monkeypatch.setattr(node_inspection, "load_resolved", lambda _: config)
    return config


# Ten seconds: every node imports what carries caches, in SGLang's environment.
def test_kv_caches_travel_between_all_nodes(prefill_apart: Config, tmp_path: Path) -> None:
    addresses = {"a": LOOPBACK, "b": LOOPBACK}
    inspection.inspect(ask_here(tmp_path, *addresses), prefill_apart, addresses, tmp_path)
    found = json.loads((tmp_path / "preflight.json").read_text())["kv_transfer"]
    assert set(found) == {"a", "b"}
    assert all(row["has_arrived"] and row["rate"] > 10 for (row,) in found.values())


def test_what_carries_kv_caches_is_not_there(prefill_apart: Config, tmp_path: Path) -> None:
    pd = dataclasses.replace(prefill_apart.engine.pd, transfer_backend="mooncake")
    own = dataclasses.replace(prefill_apart.engine, pd=pd, python=sys.executable)  # SGLang's may have it
    config = dataclasses.replace(prefill_apart, engine=own)
    (problem,) = check_transport(config)
    assert problem == (
        f"engine.pd.transfer_backend=mooncake: not importable by {sys.executable} "
        "(ModuleNotFoundError: No module named 'mooncake')"
    )
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, python="/no/python"))
    assert "not importable by /no/python ([Errno 2] " in check_transport(config)[0]


def test_clocks_are_told_apart_from_slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(kind: str) -> dict:
        now = time.time()
        time.sleep(0.2)
        return {"right": {"seconds": now + 0.1}, "ahead": {"seconds": now + 60}, "behind": {"seconds": now - 60}}

    offsets = inspection._clock_offsets(ask)
    assert offsets["right"] == 0.0
    assert offsets["ahead"] == pytest.approx(60, abs=1)
    assert offsets["behind"] == pytest.approx(-60, abs=1)

"""A gang of two pods as processes of this machine: what ends in a pod starts again there, and a lost pod ends the head.

Whole trainings in pods of a JobSet are in tests/end_to_end/test_kubernetes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.support.kubernetes_server import KubernetesServer
from tests.support.small_job import ENDS_WELL, attempts_of, make_job, required_arguments

from posttrain.cluster import pods
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.handshake import join
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.jobset import (
    EXIT_OF_A_REFUSAL,
    EXIT_TO_START_AGAIN,
    NODE_NAME,
    NODE_RANK,
    NUM_NODES,
    POD_ADDRESS,
    render,
)
from posttrain.cluster.jobset_attempt import run_to_end
from posttrain.cluster.nodes import NodesLostError
from posttrain.cluster.pods import Pods
from posttrain.cluster.rendezvous_file import RendezvousFile
from posttrain.cluster.site import find_nodes, rendezvous_path
from posttrain.cluster.worker_pod import join_head, obey
from posttrain.config.load import load_resolved
from posttrain.store import FileRecord, Receipt, write_receipt
from posttrain.store.lease import Lease

POD = """
import json, sys
from pathlib import Path
from posttrain import cli
from posttrain.config.load import load_resolved
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.site import find_nodes, rendezvous_path, is_waiting_pod
from posttrain.cluster.supervisor import supervise
from posttrain.cluster.worker_pod import lend_this_pod

def main():
    job = TrainingJob.from_dict(json.loads(sys.argv[1]))
    if is_waiting_pod():
        return lend_this_pod(rendezvous_path(job.run_folder), job.run_folder / "done.json")
    config = load_resolved(job.config_path)
    supervise(job, config, find_nodes(config, job.run_folder))

cli.run(main)
"""
# It has no versions to tell the preflight, and ends with its supervisor, as engines do.
ENGINE = "[[ $1 == -c ]] && exit 1; echo $POSTTRAIN_ENGINE_SECRET >> engine-secrets; exec sleep 600"
SECONDS = 60.0


def environment_of(rank: int) -> dict[str, str]:
    return {NODE_RANK: str(rank), NUM_NODES: "2", NODE_NAME: f"node-{rank}", POD_ADDRESS: "127.0.0.1"}


def make_pods_job(folder: Path, arguments: tuple[str, ...] = ENDS_WELL, more: str = "") -> TrainingJob:
    settings = (
        "engine.num_engines=2 launch.preflight=false site.launcher=kubernetes site.node_names=[]"
        f" site.node_local={folder} site.kubernetes.volumes=['{folder}=pvc:shared']"
        " site.kubernetes.image=registry.example/posttrain:0.2.0"
    )
    return make_job(folder, ENGINE, arguments, nodes=2, more=f"{settings} {more}")


def start_pod(job: TrainingJob, rank: int) -> subprocess.Popen:
    with open(job.run_folder / f"pod{rank}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", POD, json.dumps(job.as_dict())],
            env={**os.environ, **environment_of(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[TrainingJob], list[subprocess.Popen]]]:
    """Start both pods; what they leave behind fails the test."""
    started: list[subprocess.Popen] = []

    def start_both(job: TrainingJob) -> list[subprocess.Popen]:
        started.extend(start_pod(job, rank) for rank in (0, 1))
        return started

    yield start_both
    for process in started:
        process.kill()
        process.wait()
    engines = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
    _, left = psutil.wait_procs(engines, timeout=5)
    assert not left, "engines run in the job's folder"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def waiting_ranks(folder: Path) -> tuple[str, ...]:
    """Return arguments of ranks that wait for ever: their configuration is a pipe that nobody writes to."""
    os.mkfifo(folder / "nothing.yaml")
    return required_arguments(folder)


def ranks_run(job: TrainingJob, attempt: int) -> bool:
    return all((job.run_folder / f"attempts/{attempt:03d}/trainer{rank}.log").exists() for rank in (0, 1))


def supervisors() -> dict[str, psutil.Process]:
    """Return the supervisors below this process by the names of their nodes."""
    found = {}
    # Parents come first in the list, and win: a child that is just being made looks like its parent.
    for process in reversed(psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "posttrain.cluster.node" in words:
                found[words[-1]] = process
    return found


def test_a_gang_that_does_its_work(tmp_path: Path, start: Callable) -> None:
    job = make_pods_job(tmp_path, more="launch.preflight=true launch.preflight_min_share=0")
    head, other = start(job)
    assert (head.wait(SECONDS), other.wait(SECONDS)) == (0, 0)
    (row,) = attempts_of(tmp_path)
    assert (row["reason"], row["nodes"]) == ("done", ["node-0", "node-1"])
    assert set(json.loads((tmp_path / "attempts/001/preflight.json").read_text())["links"]) == set(row["nodes"])
    for rank in (0, 1):
        assert "usage: trainer_rank.py" in (tmp_path / f"attempts/001/trainer{rank}.log").read_text()
        assert (tmp_path / f"attempts/001/engine{rank}.log").exists()
    rendezvous = rendezvous_path(tmp_path)
    assert stat.S_IMODE(rendezvous.stat().st_mode) == 0o600
    secret = RendezvousFile.read(rendezvous).secret
    of_engines = tmp_path / "engine-secrets"
    shared, same = of_engines.read_text().split()
    assert shared == same != secret, "of the attempt, on both nodes"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path not in (rendezvous, of_engines)]
    assert len(files) > 10
    assert not [path for path in files for hidden in (secret, shared) if hidden in path.read_text()]


def test_a_supervisor_that_dies_and_a_pod_that_is_lost(tmp_path: Path, start: Callable) -> None:
    """The first starts again in its pod; the second ends the head so that JobSet starts all pods again."""
    job = make_pods_job(tmp_path, waiting_ranks(tmp_path))
    head, other = start(job)
    wait_until(lambda: ranks_run(job, 1))
    supervisors()["node-1"].kill()
    wait_until(lambda: ranks_run(job, 2))
    other.kill()
    assert head.wait(SECONDS) == EXIT_TO_START_AGAIN
    died, lost = attempts_of(tmp_path)
    assert died["reason"] == "the supervisor of node-1 is gone"
    assert lost["reason"] == "the supervisor of node-1 is gone; lost: node-1"
    assert died["epoch"] == lost["epoch"] == 1
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 2, "the pods that come next need not wait for it"


def test_pods_end_well_where_the_head_is_lost(tmp_path: Path, start: Callable) -> None:
    """What JobSet does then depends on how the head ended."""
    job = make_pods_job(tmp_path, waiting_ranks(tmp_path))
    head, other = start(job)
    wait_until(lambda: ranks_run(job, 1))
    # A rank's log is there a moment before its process.
    wait_until(lambda: len(psutil.Process(other.pid).children(recursive=True)) > 2)
    started = psutil.Process(other.pid).children(recursive=True)
    head.kill()
    assert other.wait(SECONDS) == 0
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive, "supervisor, rank and engine"


def test_pods_do_not_hide_a_refusal(tmp_path: Path, start: Callable) -> None:
    job = make_pods_job(tmp_path)
    missing = FileRecord("model.safetensors", 1, "0" * 32)
    job.rollout_receipt.unlink()
    write_receipt(job.rollout_receipt, Receipt("finalize_rollout_fp8", (missing,), {}, {}), time.time())
    head, other = start(job)
    assert (head.wait(SECONDS), other.wait(SECONDS)) == (EXIT_OF_A_REFUSAL, 0)
    assert "model.safetensors" in (tmp_path / "pod0.log").read_text()


def test_a_pod_without_a_head_ends_with_the_training(tmp_path: Path, start: Callable) -> None:
    job = make_pods_job(tmp_path)
    RendezvousFile("127.0.0.1:9", "secret").write(rendezvous_path(tmp_path))
    pod = start_pod(job, 1)
    try:
        wait_until(lambda: "Connection refused" in (tmp_path / "pod1.log").read_text())
        assert pod.poll() is None
        (tmp_path / "done.json").touch()
        assert pod.wait(SECONDS) == 0
    finally:
        pod.kill()
        pod.wait()


def test_a_jobset_goes_on_after_a_lost_pod_and_ends_with_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_pods_job(tmp_path, waiting_ranks(tmp_path), "launch.max_idle_attempts=1")
    command = ("python", "-c", POD, json.dumps(job.as_dict()))
    log = tmp_path / "logs/train/run.log"
    with ThreadPoolExecutor() as pool, KubernetesServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        manifest = render(load_resolved(job.config_path), tmp_path, log, command, 2)
        end = pool.submit(run_to_end, Cluster("default", 0.05, timeout_seconds=5), manifest)
        wait_until(lambda: ranks_run(job, 1))
        server.kill_pod(f"{manifest['metadata']['name']}-nodes-0-1-00000")
        wait_until(lambda: ranks_run(job, 2))
        supervisors()["node-1"].kill()
        error = end.exception(SECONDS)
    assert "exit code 1 (Error)" in str(error)
    assert "without progress, the last time because the supervisor of node-1 is gone" in str(error)
    assert server.jobsets[manifest["metadata"]["name"]]["status"]["restarts"] == 1
    assert [row["epoch"] for row in attempts_of(tmp_path)] == [1, 2], "the attempt of the lost pods, and of the next"


# ---- the two sides in one process ----


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    """The head of a gang of two, which waits for the other pod."""
    for name, value in environment_of(0).items():
        monkeypatch.setenv(name, value)
    nodes = find_nodes(load_resolved(make_pods_job(tmp_path).config_path), tmp_path)
    assert isinstance(nodes, Pods)
    threading.Thread(target=nodes.choose, args=(2,), daemon=True).start()
    wait_until(rendezvous_path(tmp_path).exists)
    return nodes


@pytest.fixture
def rendezvous(head: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RendezvousFile:
    """What the other pod reads; this process has its place from here on."""
    for name, value in environment_of(1).items():
        monkeypatch.setenv(name, value)
    return RendezvousFile.read(rendezvous_path(tmp_path))


def test_a_pod_that_answers_is_not_lost(head: Pods, rendezvous: RendezvousFile) -> None:
    threading.Thread(target=obey, args=(join_head(rendezvous),), daemon=True).start()
    assert head.choose(2) == ["node-0", "node-1"]
    assert head.check(["node-0", "node-1"]) == []
    assert head.choose(2) == ["node-0", "node-1"]


def test_what_has_ended_in_all_pods_does_not_run(head: Pods, rendezvous: RendezvousFile, tmp_path: Path) -> None:
    threading.Thread(target=obey, args=(join_head(rendezvous),), daemon=True).start()
    names = head.choose(2)
    started = head.start(names, ["sh", "-c", f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.05; done"], {}, tmp_path)
    assert started.is_running()
    (tmp_path / "go").touch()
    wait_until(lambda: not started.is_running())
    started.end()


def test_a_pod_that_does_not_answer_is_lost(
    head: Pods, rendezvous: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "PROBE_SECONDS", 0.2)
    _silent = join(rendezvous.address, rendezvous.secret, "1", node="node-1")
    assert head.choose(2) == ["node-0", "node-1"]
    assert head.check(["node-0", "node-1"]) == ["node-1"]
    with pytest.raises(NodesLostError, match="needs all 2 pods, and has lost node-1"):
        head.choose(2)
    with pytest.raises(SystemExit) as raised:
        head.scheduler.requeue()
    assert raised.value.code == EXIT_TO_START_AGAIN


def test_pods_on_one_node_have_names_of_their_own(
    head: Pods, rendezvous: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_NAME, "node-0")
    _silent = join_head(rendezvous)
    assert head.choose(2) == ["node-0-0", "node-0-1"]


def test_a_pod_with_a_wrong_secret_is_not_taken_in(head: Pods, rendezvous: RendezvousFile) -> None:
    with pytest.raises(ConnectionError, match="is not the head, or does not take 1"):
        join_head(RendezvousFile(rendezvous.address, "of an earlier head"))
    threading.Thread(target=obey, args=(join_head(rendezvous),), daemon=True).start()
    assert head.choose(2) == ["node-0", "node-1"], "the pod itself still is"


@pytest.mark.parametrize("who", ["0", "2", "-1", "01", "head", ""])
def test_a_pod_of_no_rank_is_not_taken_in(head: Pods, rendezvous: RendezvousFile, who: str) -> None:
    """The head itself is rank 0, and there are two."""
    with pytest.raises(ConnectionError, match=f"does not take {who}: "):
        join(rendezvous.address, rendezvous.secret, who, node="node-1")


def test_a_place_that_is_taken_stays_so(head: Pods, rendezvous: RendezvousFile) -> None:
    first = join_head(rendezvous)
    with pytest.raises(ConnectionError, match="does not take 1"):
        join_head(rendezvous)
    threading.Thread(target=obey, args=(first,), daemon=True).start()
    assert head.choose(2) == ["node-0", "node-1"]
    assert head.check(["node-1"]) == []


@pytest.mark.parametrize("pods_of_the_gang", ["3", "1"])
def test_a_configuration_that_was_changed_under_the_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods_of_the_gang: str
) -> None:
    monkeypatch.setenv(NUM_NODES, pods_of_the_gang)
    with pytest.raises(RuntimeError, match=f"nodes=2, but this gang has {pods_of_the_gang} pods"):
        find_nodes(load_resolved(make_pods_job(tmp_path).config_path), tmp_path)

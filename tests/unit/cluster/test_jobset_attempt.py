"""The launcher and the official client against a Kubernetes API server on loopback, which runs pods as processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes_server import CUT, KubernetesServer
from tests.support.resolved_words import resolved_words

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.container import CLONE
from posttrain.cluster.jobset import jobset_name, render
from posttrain.cluster.jobset_attempt import run_to_end
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"
NAMESPACE = "training"
PAUSE_SECONDS = 0.05
LOG = Path("logs/train/run.log")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.secrets["tokens", "hub"] = "hf_secret_value"
        yield server


@pytest.fixture
def cluster(server: KubernetesServer) -> Cluster:
    return Cluster(NAMESPACE, PAUSE_SECONDS)


def overrides(tmp_path: Path) -> str:
    return (
        f"site.launcher=kubernetes site.node_names=[] site.node_local={tmp_path}/local site.kubernetes.max_restarts=2"
        f" site.kubernetes.volumes=['{tmp_path}=pvc:shared','{CLONE}=pvc:code'] site.kubernetes.image=registry/image:1"
        f" site.kubernetes.namespace={NAMESPACE} site.kubernetes.secrets=[HF_TOKEN=tokens/hub]"
    )


def choice(tmp_path: Path) -> dict[str, str]:
    return {"model": "tiny", "site": "local", "run": "run", "set": overrides(tmp_path)}


def manifest_of(tmp_path: Path, script: str, nodes: int = 1) -> dict[str, Any]:
    config = resolve(choice(tmp_path), CONFIG_DIR).config
    return render(config, tmp_path / "results" / "run", LOG, ("sh", "-c", script), nodes)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_gang_runs_to_its_end(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"echo $POSTTRAIN_NODE_RANK of $POSTTRAIN_NUM_NODES on $POSTTRAIN_NODE_NAME: $HF_TOKEN >> {out}"
    manifest = manifest_of(tmp_path, script, nodes=3)
    run_to_end(cluster, manifest)
    assert sorted(lines_of(out)) == [f"{rank} of 3 on node-{rank}: hf_secret_value" for rank in range(3)]
    assert "hf_secret_value" not in str(server.created), "a Secret's value is in the cluster only"


def test_a_refusal_ends_it_with_the_pods_last_words(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    script = 'if [ $POSTTRAIN_NODE_RANK = 1 ]; then echo "no space left on device"; exit 1; fi; sleep 60'
    manifest = manifest_of(tmp_path, script, nodes=2)
    name = manifest["metadata"]["name"]
    with pytest.raises(RuntimeError, match="no space left on device") as caught:
        run_to_end(cluster, manifest)
    text = str(caught.value)
    assert f"pod {name}-nodes-0-1-00000 on node node-1 ended with exit code 1 (Error)" in text
    assert "1 more pods failed after it" in text
    assert server.jobsets[name]["status"]["restarts"] == 0, "what was refused is not tried again"


def test_a_lost_pod_starts_the_gang_again(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"echo x >> {out}; [ $(wc -l < {out}) = 2 ] || kill -9 $$"
    run_to_end(cluster, manifest_of(tmp_path, script))
    assert lines_of(out) == ["x", "x"]


def test_pods_that_are_lost_again_and_again_end_it(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"max number of restarts(.|\n)*exit code 137"):
        run_to_end(cluster, manifest_of(tmp_path, "kill -9 $$"))


def test_two_drivers_at_once_start_one_gang(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = manifest_of(tmp_path, f"echo x >> {out}; sleep 0.5")
    drivers = [threading.Thread(target=run_to_end, args=(cluster, manifest)) for _ in range(6)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(30)
    assert lines_of(out) == ["x"]
    assert len(server.created) == 1


def test_what_has_ended_makes_room_for_the_next(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        run_to_end(cluster, manifest_of(tmp_path, "exit 1"))
    run_to_end(cluster, manifest_of(tmp_path, "true"))
    run_to_end(cluster, manifest_of(tmp_path, "true"))
    assert [made["metadata"]["uid"] for made in server.created] == ["uid-1", "uid-2", "uid-3"]
    assert len(server.jobsets) == 1


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_what_is_not_ours_is_left_alone(server: KubernetesServer, cluster: Cluster, tmp_path: Path, part: str) -> None:
    theirs = manifest_of(tmp_path, "sleep 60")
    theirs["metadata"][part] = {"posttrain/run-folder": "/theirs"} if part == "annotations" else {}
    assert server.create(NAMESPACE, theirs)[0] == 201
    with pytest.raises(RuntimeError, match="it is left alone"):
        run_to_end(cluster, manifest_of(tmp_path, "true"))
    assert "deletionTimestamp" not in server.jobsets[theirs["metadata"]["name"]]["metadata"]


@pytest.mark.parametrize(("script", "nodes"), [("true", 1), ("sleep 60", 2)])
def test_what_runs_with_other_settings_is_not_taken_for_this(
    server: KubernetesServer, cluster: Cluster, tmp_path: Path, script: str, nodes: int
) -> None:
    assert cluster.create(manifest_of(tmp_path, "sleep 60"))
    with pytest.raises(RuntimeError, match="other settings"):
        run_to_end(cluster, manifest_of(tmp_path, script, nodes))
    assert len(server.created) == len(server.jobsets) == 1


def test_a_deleted_gang_is_no_success(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "sleep 60")
    name = manifest["metadata"]["name"]

    def delete() -> None:
        wait_until(lambda: server.pods)
        server.delete(name, None)

    threading.Thread(target=delete).start()
    with pytest.raises(RuntimeError, match="was deleted"):
        run_to_end(cluster, manifest)


def test_an_older_uid_deletes_nothing(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "sleep 60")
    assert cluster.create(manifest)
    name = manifest["metadata"]["name"]
    cluster.delete({"metadata": {"name": name, "uid": "uid-of-an-earlier-one"}})
    assert name in server.jobsets


def test_passing_faults_are_asked_again(
    server: KubernetesServer, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    # Read, then a created JobSet of which nobody is told, then trouble while it is followed.
    server.answers = [503, 429, CUT]
    with caplog.at_level(logging.WARNING):
        run_to_end(cluster, manifest_of(tmp_path, f"echo x >> {out}; sleep 0.3"))
    assert lines_of(out) == ["x"]
    assert len(server.created) == 1
    assert any("503" in message and "asking again" in message for message in caplog.messages)


def test_a_server_that_stays_away_is_given_up(server: KubernetesServer, tmp_path: Path) -> None:
    server.answers = [500] * 100
    with pytest.raises(RuntimeError, match="run the same command again to follow it"):
        run_to_end(Cluster(NAMESPACE, PAUSE_SECONDS, timeout_seconds=0.3), manifest_of(tmp_path, "true"))


@pytest.mark.parametrize(("status", "cause"), [(401, "credentials"), (403, "needs get, create and delete")])
def test_refused_access_says_what_is_missing(
    server: KubernetesServer, cluster: Cluster, tmp_path: Path, status: int, cause: str
) -> None:
    server.answers = [status]
    with pytest.raises(RuntimeError, match=cause):
        run_to_end(cluster, manifest_of(tmp_path, "true"))


def test_a_cluster_without_jobset_says_so(server: KubernetesServer, cluster: Cluster, tmp_path: Path) -> None:
    server.answers = [404, 404]
    with pytest.raises(RuntimeError, match="JobSet is not installed"):
        run_to_end(cluster, manifest_of(tmp_path, "true"))


def test_what_a_server_refuses_to_create_is_told(cluster: Cluster, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "true")
    manifest["spec"]["replicas"] = 3
    with pytest.raises(RuntimeError, match="422"):
        run_to_end(cluster, manifest)


def test_a_queue_is_waited_for(
    server: KubernetesServer, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_admitting = False
    manifest = manifest_of(tmp_path, "sleep 0.3")
    manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"

    def admit() -> None:
        wait_until(lambda: "waits in Kueue's queue team" in caplog.text)
        server.is_admitting = True

    threading.Thread(target=admit).start()
    with caplog.at_level(logging.INFO):
        run_to_end(cluster, manifest)
    assert "1 of 1 pods run" in caplog.text


def test_why_a_pod_does_not_start_is_told(
    server: KubernetesServer, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of(tmp_path, "sleep 60")

    def spoil() -> None:
        wait_until(lambda: server.pods)
        (pod,) = server.pods.values()
        pod["status"]["containerStatuses"][0]["state"] = {
            "waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}
        }
        pod["status"]["phase"] = "Pending"
        wait_until(lambda: "ImagePullBackOff (no such tag)" in caplog.text)
        server.delete(manifest["metadata"]["name"], None)

    threading.Thread(target=spoil).start()
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="was deleted"):
        run_to_end(cluster, manifest)
    assert "0 of 1 pods run" in caplog.text


def start_driver(tmp_path: Path, script: str, mounted: Path | None = None) -> subprocess.Popen[str]:
    """Start the launcher as the rule does, in a folder of the "cluster"."""
    words = [*resolved_words(choice(mounted or tmp_path), tmp_path), "--num-nodes", "1"]
    words += ["--pause-seconds", str(PAUSE_SECONDS)]
    return subprocess.Popen(
        [sys.executable, "-m", "posttrain.cluster.on_kubernetes", *words, "--", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "POSTTRAIN_LOG": str(LOG)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a terminal: whoever started the tests may have left the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_driver_that_dies_is_followed_by_the_next(server: KubernetesServer, tmp_path: Path) -> None:
    out, go = tmp_path / "out", tmp_path / "go"
    script = f"echo x >> {out}; while [ ! -e {go} ]; do sleep 0.05; done"
    first = start_driver(tmp_path, script)
    wait_until(lambda: lines_of(out))
    first.kill()
    first.communicate()
    second = start_driver(tmp_path, script)
    wait_until(lambda: "following it" in (tmp_path / LOG).read_text())
    go.touch()
    said, _ = second.communicate(timeout=30)
    assert second.returncode == 0, said
    assert lines_of(out) == ["x"]


@pytest.mark.parametrize(("sent", "is_left"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_only_the_users_interrupt_takes_the_gang_along(
    server: KubernetesServer, tmp_path: Path, sent: int, is_left: bool
) -> None:
    out = tmp_path / "out"
    driver = start_driver(tmp_path, f"echo x >> {out}; sleep 60")
    wait_until(lambda: lines_of(out))
    driver.send_signal(sent)
    driver.communicate(timeout=30)
    assert driver.returncode != 0
    assert (jobset_name(tmp_path / "results" / "run", LOG) in server.jobsets) == is_left


def test_a_folder_that_pods_do_not_see_is_refused(server: KubernetesServer, tmp_path: Path) -> None:
    driver = start_driver(tmp_path, "true", mounted=tmp_path / "elsewhere")
    said, _ = driver.communicate(timeout=30)
    assert driver.returncode == 1
    assert "site.kubernetes.volumes" in said
    assert not server.created

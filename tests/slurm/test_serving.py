"""`posttrain serve` as a job of a real SLURM: found by its lease, ended by `--stop`, over one node and two."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.image_runtimes import ImageRuntime
from tests.support.slurm_cluster import Cluster
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt, write_reference_logprobs
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer

# What stands for vLLM, which has no GPUs here: it says what it was told, and the first node's part is healthy.
STAND_IN = """#!{python}
import http.server, os, sys, time
print("told", " ".join(sys.argv[1:]), "on", os.uname().nodename, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
if "--headless" not in sys.argv:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("0.0.0.0", port), Healthy).serve_forever()
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    make_random_checkpoint(made, dataclasses.replace(TINY_QWEN3, vocab_size=256))
    make_tokenizer(256).save_pretrained(made)
    return made


@pytest.fixture
def serve(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., str]]:
    cluster.wait_until_idle()
    work = tmp_path / "work"
    work.mkdir()

    def call(*words: object, code: int = 0, site: str = "slurm_localhost", **more: str) -> str:
        command = [sys.executable, "-m", "posttrain", "serve", *map(str, words), f"site={site}"]
        env = {**os.environ, **cluster.environment, "POSTTRAIN_ENGINE_SECRET": "of the job", **more}
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield call
    if list(work.glob("results/serving/*.json")):
        call("--stop")


def told(tmp_path: Path) -> dict[str, object]:
    (path,) = (tmp_path / "work/results/serving").glob("*.json")
    return dict(json.loads(path.read_text()))


def log_with(cluster: Cluster, tmp_path: Path, job: str, words: str) -> str:
    log = tmp_path / f"work/results/serving/slurm-{job}.log"
    deadline = time.monotonic() + 120
    while words not in (text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, text + cluster.ask("squeue")
        time.sleep(0.5)
    return text


def submitted(tmp_path: Path) -> str:
    return str(told(tmp_path)["job"]).partition(":")[2]


def test_a_job_serves_until_it_is_stopped(
    cluster: Cluster, folder: Path, tmp_path: Path, serve: Callable[..., str]
) -> None:
    words = (folder, "--engine", "embedded", "--hardware", "cpu", "--port", 8311)
    assert "--host = 127.0.0.1" in serve(*words, code=1)
    assert "POSTTRAIN_ENGINE_SECRET = not set" in serve(*words, code=1, POSTTRAIN_ENGINE_SECRET="")
    assert cluster.jobs() == []
    said = serve(*words, "--host", "0.0.0.0")
    job = submitted(tmp_path)
    assert f"posttrain serve {job} --stop" in said
    assert cluster.jobs() == [job]
    assert "not checked" in log_with(cluster, tmp_path, job, "healthy at http://127.0.0.1:8311")
    server = told(tmp_path)
    assert server["host"] in cluster.nodes
    assert server["port"] == 8311
    assert server["checkpoint"] == str(folder)
    assert len(str(server["digest"])) >= 32
    assert "has ended" in serve(folder, "--stop")
    assert cluster.jobs() == []
    assert "nothing to end" in serve(folder, "--stop")


@pytest.mark.faults("queue")
def test_a_job_that_serves_something_else_ends(
    cluster: Cluster, folder: Path, tmp_path: Path, serve: Callable[..., str]
) -> None:
    messages = [{"role": "user", "content": "3141"}]
    write_reference_logprobs(
        folder, ReferenceLogprobs("fp32", {}, [ReferencePrompt(messages, None, [5, 6], [7, 8], [-0.1, -0.1])])
    )
    serve(folder, "--engine", "embedded", "--hardware", "cpu", "--port", 8312, "--host", "0.0.0.0")
    job = submitted(tmp_path)
    cluster.wait_until(lambda: cluster.state(job) == "FAILED")
    assert "nats from the trainer's" in log_with(cluster, tmp_path, job, "nats")
    assert list((tmp_path / "work/results/serving").glob("*.json")) == [], "its file goes with it"


@pytest.mark.faults("queue")
def test_each_node_has_its_part_and_all_end_together(
    cluster: Cluster, tmp_path: Path, serve: Callable[..., str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(STAND_IN.format(python=sys.executable))
    (programs / "vllm").chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    words = ("qwen3_4b", "--engine", "vllm", "--hardware", "h100", "--nodes", 2, "--host", "0.0.0.0", "--port", 8313)
    serve(*words, **path)
    job = submitted(tmp_path)
    text = log_with(cluster, tmp_path, job, "healthy at")
    nodes = cluster.ask("squeue", "--noheader", "--jobs", job, "--format", "%N")
    names = cluster.ask("scontrol", "show", "hostnames", nodes).split()
    assert len(names) == 2
    assert text.count(f"--master-addr {names[0]}") == 2
    assert "--node-rank 1" in text
    assert "--headless" in text
    assert told(tmp_path)["gpus"] == [str(gpu) for gpu in range(8)]
    assert "has ended" in serve(job, "--stop")
    assert cluster.jobs() == []


@pytest.mark.faults("queue")
@pytest.mark.parametrize("name", ["apptainer", "pyxis"])
def test_a_job_serves_in_the_image(
    cluster: Cluster, folder: Path, tmp_path: Path, serve: Callable[..., str], name: str
) -> None:
    runtime = ImageRuntime(tmp_path / "runtime", name)
    site = yaml.safe_load((ROOT / "config/sites/slurm_localhost.yaml").read_text())
    site["site"]["container"] = {"runtime": name, "image": str(runtime.image)}
    (tmp_path / "own/sites").mkdir(parents=True)
    (tmp_path / "own/sites/in_image.yaml").write_text(yaml.safe_dump(site))
    words = (folder, "--engine", "embedded", "--hardware", "cpu", "--port", 8314, "--host", "0.0.0.0")
    serve(*words, f"configs={tmp_path / 'own'}", site="in_image", **runtime.environment)
    job = submitted(tmp_path)
    log_with(cluster, tmp_path, job, "healthy at http://127.0.0.1:8314")
    (started,) = runtime.calls()
    assert f"{folder}:{folder}" in " ".join(started), "it is shown"
    assert "serve" in started
    assert "has ended" in serve(job, "--stop")
    assert cluster.jobs() == []

"""`posttrain serve` as a user runs it: what it shows, what it refuses, and a real engine in the foreground."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.support.fault_parts import Count
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import run_posttrain
from tests.support.rejections import assert_rejected
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint

from posttrain.__main__ import _answer as answer_serve
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.engines.ports import choose_free_ports
from posttrain_serving.servers import this_machine

SECRET = "of those who may ask"
NUM_KILLS = 30
GREEDY = {"model": "hf", "prompt": "sort the digits.\n31", "max_tokens": 4, "temperature": 0}


def serve(folder: Path, *words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "POSTTRAIN_ENGINE_SECRET"} | environment
    done = run_posttrain("serve", *words, folder=folder, environment=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_command_is_shown_with_reasons_and_nothing_is_written(tmp_path: Path) -> None:
    shown = serve(tmp_path, "zai-org/GLM-5-FP8", "--hardware", "b200", "--print").stdout
    assert "  --dsa-decode-backend trtllm \\\n" in shown
    assert "(hardware.kernels.dsa_decode in\n#       config/hardware/b200.yaml)" in shown
    assert "config/hardware/b200.yaml" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_described_as_everywhere(tmp_path: Path) -> None:
    done = serve(tmp_path, "model=glm5", "--hardware", "b200", "--precision", "fp8", "--engine", "vllm", "--print")
    assert "export_fp8-" in done.stdout
    assert "is not there yet: `snakemake" in " ".join(done.stdout.replace("#", "").split())
    assert "--hardware = not given" not in done.stdout


def test_hardware_of_ones_own_is_found(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "hardware"
    own.mkdir(parents=True)
    text = (Path(__file__).parents[2] / "config" / "hardware" / "h200.yaml").read_text()
    (own / "big.yaml").write_text(text.replace("name: h200", "name: big").replace("140.4", "400"))
    done = serve(tmp_path, "glm5", "--hardware", "big", f"configs={tmp_path / 'mine'}", "--print")
    assert "  --tp-size 4 \\\n" in done.stdout
    refused = serve(tmp_path, "glm5", "--hardware", "h200", "--nodes", 1, f"configs={tmp_path / 'mine'}", code=1)
    assert "--hardware mi300x" in refused.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--print"], "checkpoint = nothing"),
        (["glm5", "model=glm5", "--print"], "checkpoint = 'glm5' and a run"),
        (["glm5", "--hardware", "h300", "--print"], "did you mean 'h200'?"),
        (["glm5", "--hardware", "h100", "--nodes", "1", "--print"], "--nodes 4 (32 GPUs)"),
        (["glm5", "--hardware", "h100"], "serve = 4 processes"),
        (["glm5", "--hardware", "b200", "--engine", "trtllm", "--precision", "nvfp4"], "serve = files for trtllm"),
        (["model=qwen3_0.6b", "--hardware", "h100"], "remedy:  `snakemake "),
        (["qwen3_0.6b", "--hardware", "h100", "--engine", "vllm"], "no vllm on PATH"),
        (["zai-org/GLM-5", "nodse=2", "--hardware", "h100", "--print"], "checkpoint = 'zai-org/GLM-5' and a run"),
    ],
)
def test_what_cannot_be_served_is_one_clear_problem(tmp_path: Path, words: list[str], told: str) -> None:
    done = serve(tmp_path, *words, code=1, PATH="/usr/bin:/bin")
    assert told in done.stderr


def test_a_folder_has_no_hardware_of_its_own(folder: Path, tmp_path: Path) -> None:
    done = serve(tmp_path, folder, "--print", code=1)
    assert_rejected(done.stderr, "not-set", key="--hardware")
    assert "rtx_pro_6000" in done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served") / "hf"
    make_random_checkpoint(made, dataclasses.replace(TINY_QWEN3, vocab_size=256))
    make_tokenizer(256).save_pretrained(made)
    return made


def test_what_is_shown_is_what_the_checkpoint_is_now(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of an earlier call is kept: what has not changed is said again, what has is said anew."""
    shutil.copytree(folder, tmp_path / "hf")

    def shown(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["posttrain", "serve", "hf", "--hardware", "h200", "--print", *more])
        monkeypatch.chdir(tmp_path)
        answer_serve()
        return capsys.readouterr().out

    first = shown()
    assert shown() == first
    content = json.loads((tmp_path / "hf" / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    after = shown("--port", "12345")
    assert (" in bf16 by" in first, " in fp8 by" in after) == (True, True)
    assert ("--port 8000" in first, "--port 12345" in after) == (True, True)


def test_without_a_secret_and_with_a_port_in_use_nothing_starts(folder: Path, tmp_path: Path) -> None:
    words = (folder, "--engine", "embedded", "--hardware", "cpu")
    assert "POSTTRAIN_ENGINE_SECRET = not set" in serve(tmp_path, *words, code=1).stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path, *words, "--port", port, code=1, POSTTRAIN_ENGINE_SECRET=SECRET)
    assert f"{port}: Address already in use" in done.stderr


# What stands for vLLM on a machine without GPUs: it notes which it was given.
STAND_IN = """#!{python}
import http.server, os, sys
with open({seen!r}, "a") as file:
    print(os.environ["CUDA_VISIBLE_DEVICES"], file=file)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder for PATH; beside it lies `seen`, a line for each that was started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(STAND_IN.format(python=sys.executable, seen=str(tmp_path / "seen")))
    (programs / "vllm").chmod(0o755)
    return programs


def test_of_two_servers_on_one_gpu_the_second_never_sees_it(stand_in: Path, tmp_path: Path) -> None:
    first, second = choose_free_ports(2)
    words = ("qwen3_0.6b", "--hardware", "h100", "--engine", "vllm")
    env = {"PATH": f"{stand_in}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3"}
    command = [sys.executable, "-m", "posttrain", "serve", *words, "--port", str(first)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, stdout=output, stderr=output)
    try:
        while "healthy at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        refused = serve(tmp_path, *words, "--port", second, code=1, **env).stderr
        assert f"GPU 3 = has process {process.pid}" in refused
        assert "`posttrain serve qwen3_0.6b --stop` ends it, or CUDA_VISIBLE_DEVICES gives others" in refused
        assert (tmp_path / "seen").read_text() == "3\n"
    finally:
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "results/serving").glob("*.json")) == []


def test_an_engine_that_compiles_needs_a_compiler(folder: Path, stand_in: Path, tmp_path: Path) -> None:
    made = tmp_path / "fp8"
    made.mkdir()
    for path in folder.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (made / "config.json").write_text(json.dumps(config))
    words = (made, "--hardware", "h100", "--engine", "vllm")
    done = serve(tmp_path, *words, code=1, PATH=f"{stand_in}:/usr/bin:/bin")
    assert_rejected(done.stderr, "program-missing", key="nvcc")
    assert "2,259 kernels" in done.stderr
    assert "cutlass" not in done.stderr, "no DeepGEMM is beside this vLLM"
    # Of a package without its headers both are told; of one's own that has them nothing, whatever vLLM brings.
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "vllm" / "third_party" / "deep_gemm" / "include").mkdir(parents=True)
    done = serve(tmp_path, *words, code=1, PATH=f"{stand_in}:/usr/bin:/bin")
    assert_rejected(done.stderr, "program-missing", key="nvcc")
    assert_rejected(done.stderr, "package-missing", "third_party/deep_gemm", "include/cutlass/cutlass.h")
    (packages / "deep_gemm" / "include" / "cutlass").mkdir(parents=True)
    (packages / "deep_gemm" / "include" / "cutlass" / "cutlass.h").touch()
    assert "cutlass" not in serve(tmp_path, *words, code=1, PATH=f"{stand_in}:/usr/bin:/bin").stderr
    assert not (tmp_path / "seen").exists()


def ask(port: int, secret: str) -> str:
    body = json.dumps(GREEDY).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def answer(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """Return the first answer of an engine that has just been started."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return ask(port, SECRET)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


# At every change SGLang is served like this, asked, and gone with its server in test_engines_agree.py.
SGLANG_APART = pytest.param("sglang", marks=(pytest.mark.sglang, pytest.mark.faults("engines")))


@pytest.mark.parametrize("engine", ["embedded", SGLANG_APART])
def test_an_engine_serves_in_the_foreground_and_ends_with_it(folder: Path, tmp_path: Path, engine: str) -> None:
    if engine == "sglang":
        require_sglang()
    (port,) = choose_free_ports(1)
    words = [folder, "--engine", engine, "--hardware", "cpu", "--port", port]
    words += ["--python", PYTHON] if engine == "sglang" else []
    command = [sys.executable, "-m", "posttrain", "serve", *map(str, words)]
    env = os.environ | {"POSTTRAIN_ENGINE_SECRET": SECRET, "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)
    try:
        assert answer(process, port, log)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, "another")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
def test_a_server_killed_at_any_time_frees_port_and_lease(
    folder: Path, tmp_path: Path, count: Count, faults: FaultRecord
) -> None:
    """The engine ends with it, the next start serves on the same port, and the checkpoint keeps its bytes."""
    (port,) = choose_free_ports(1)
    command = [sys.executable, "-m", "posttrain", "serve", str(folder), "--engine", "embedded", "--hardware", "cpu"]
    command += ["--port", str(port)]
    env = os.environ | {"POSTTRAIN_ENGINE_SECRET": SECRET, "TMPDIR": str(tmp_path)}
    log, rng, started = tmp_path / "log", random.Random(len(count.rows)), time.monotonic()

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)

    def end(process: subprocess.Popen[bytes]) -> int:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert psutil.wait_procs(children, timeout=30)[1] == [], "an engine outlived its server"
        return process.wait()

    begun, process = time.monotonic(), start()
    expected = answer(process, port, log)
    length, before = time.monotonic() - begun, {path.name: path.read_bytes() for path in folder.iterdir()}
    assert end(process) == -signal.SIGKILL
    while len(count.rows) < NUM_KILLS:
        process = start()
        time.sleep(seconds := rng.uniform(0, 1.2) * length)
        assert process.poll() is None, log.read_text()[-2000:]
        assert end(process) == -signal.SIGKILL
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        count.add([{"seconds": seconds}])
    process = start()
    try:
        assert answer(process, port, log) == expected
        assert f"at {this_machine()}:{port} has ended" in serve(tmp_path, folder, "--stop").stdout
    finally:
        process.kill()
    assert "there is nothing to end" in serve(tmp_path, folder, "--stop").stdout
    faults.add_counts("kills", {"posttrain serve": len(count.rows)}, time.monotonic() - started)
    faults.equal = True

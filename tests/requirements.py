"""What a machine may lack: the test is skipped there, or fails where `REQUIRE` names it."""

from __future__ import annotations

import os

import pytest


def require(name: str, reason: str) -> None:
    """Skip the test for `reason`, or fail it where the environment's `REQUIRE` has `name`; go on without a reason."""
    if reason:
        pytest.fail(reason) if name in os.environ.get("REQUIRE", "") else pytest.skip(reason)

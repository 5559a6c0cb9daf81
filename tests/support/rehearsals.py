"""The environment in which ranks are rehearsed, where it is."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.rehearsal.start import VARIABLE


def require_rehearsal() -> None:
    """Skip the test, or fail it where REQUIRE says so, if `make env-rehearsal` was not run."""
    home = Path(os.environ.get(VARIABLE) or ROOT / ".envs" / "rehearsal")
    require("rehearsal", "" if (home / ".ready").exists() else "`make env-rehearsal` was not run")

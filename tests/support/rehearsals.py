"""Rehearsals in tests: where the environment is, and what is rehearsed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.megatron_single import CONFIG_DIR
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.planner.resolve import resolve
from posttrain.rehearsal.start import VARIABLE, rehearse


def rehearsed(library: Path | None = None, **workflow: Any) -> dict[str, Any]:
    """Rehearse a configuration, or skip the test without `make env-rehearsal`.

    Args:
        library: Folder of the library whose code runs; ours where it is None.
        workflow: What `--config` would have.
    """
    home = Path(os.environ.get(VARIABLE) or ROOT / ".envs" / "rehearsal")
    require("rehearsal", "" if (home / ".ready").exists() else "`make env-rehearsal` was not run")
    return rehearse(resolve({"site": "local", **workflow}, CONFIG_DIR), library)

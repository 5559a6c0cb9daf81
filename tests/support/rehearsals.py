"""Rehearsals in tests: where the environment is, and what is rehearsed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve
from posttrain_rehearsal.rank_subset import stages_of
from posttrain_rehearsal.start import VARIABLE, rehearse

TOLERANCE = 0.05
# Weight transfer is not among them: what it holds on its way is not in the plan, which says so.
PHASES = ("old_logprobs", "mismatch", "train")


def rehearsed(library: Path | None = None, **workflow: Any) -> dict[str, Any]:
    """Rehearse a configuration, or skip the test without `make env-rehearsal`.

    Args:
        library: Folder of the library whose code runs; ours where it is None.
        workflow: What `--config` would have.
    """
    home = Path(os.environ.get(VARIABLE) or ROOT / ".envs" / "rehearsal")
    require("rehearsal", "" if (home / ".ready").exists() else "`make env-rehearsal` was not run")
    return rehearse(resolve({"site": "local", **workflow}, CONFIG_DIR), library)


def hold_against_plan(outcome: dict[str, Any], **workflow: Any) -> None:
    """Fail where the plan's memory of a phase and stage is not the rehearsal's, or fits and the rehearsal does not."""
    config = resolve({"site": "local", **workflow}, CONFIG_DIR).config
    gib = _fullest(outcome)
    assert {*gib} == {(stage, phase) for stage in stages_of(config, quick=bool(workflow["quick"])) for phase in PHASES}
    for place, (in_rehearsal, in_plan) in gib.items():
        print(f"{place}: {in_rehearsal:.3f} GiB, planned {in_plan:.3f}, {in_plan / in_rehearsal - 1:+.1%}")
        assert in_plan == pytest.approx(in_rehearsal, rel=TOLERANCE), place
    if not find_problems(config):
        most = max(row["whole_gib"] for row in outcome["memory"] if row["phase"] in PHASES)
        assert most + outcome["reserved_gib"] <= outcome["capacity_gib"], "it plans as fitting"


def _fullest(outcome: dict[str, Any]) -> dict[tuple[int, str], tuple[float, float]]:
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for row in outcome["memory"]:
        # In the second step rows are full, and the optimizer has its state.
        if row["phase"] in PHASES and row["step"] == 2:
            place = row["stage"], row["phase"]
            found[place] = max(found.get(place, (0.0, 0.0)), (row["peak_gib"], row["planned_gib"]))
    return found

"""Jobs that the version before has started still find what they run."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

# What that version started by `python -m`, and what its pages named.
PROGRAMS = {
    "posttrain.engines.embedded": "posttrain.rl.engines.embedded",
    "posttrain.foreign.page": "posttrain_import.page",
    "posttrain.launch.beside_engines": "posttrain.cluster.beside_engines",
    "posttrain.launch.calibration_rank": "posttrain.cluster.calibration_rank",
    "posttrain.launch.node": "posttrain.cluster.node",
    "posttrain.launch.on_kubernetes": "posttrain.cluster.on_kubernetes",
    "posttrain.launch.requeue_watchdog": "posttrain.cluster.requeue_watchdog",
    "posttrain.launch.spare_node": "posttrain.cluster.spare_node",
    "posttrain.launch.trainer_rank": "posttrain.cluster.trainer_rank",
    "posttrain.preflight.links": "posttrain.plan.preflight.links",
    "posttrain.processes": "posttrain.cluster.processes",
    "posttrain.reward.worker": "posttrain.rl.reward.worker",
}


@pytest.mark.parametrize("old", PROGRAMS)
def test_a_program_is_found_under_its_old_name(old: str) -> None:
    found, moved = find_spec(old), find_spec(PROGRAMS[old])
    assert found is not None
    assert moved is not None
    assert found.origin == moved.origin


def test_it_runs_under_its_old_name() -> None:
    command = [sys.executable, "-m", "posttrain.launch.requeue_watchdog", "--help"]
    assert "--job" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_other_names_are_not_found() -> None:
    assert find_spec("posttrain.launched") is None

"""When the rule `approve_environment` is there, and when it runs again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.branches import jobs_of
from tests.support.planned_jobs import planned_jobs
from tests.support.workflow_runs import WorkflowFolder

from posttrain.store import receipt_of

SOURCE = """
class Guess:
    def __init__(self, seed): ...
    def reset(self, row): return row["messages"], None
    def step(self, action): return [], True
    def reward(self, trajectory): return 0.0
"""
OWN = "data.environment=guess.py:Guess data.reward=environment"


def settings_with(folder: Path, change: str, source: str = SOURCE) -> str:
    folder.mkdir()
    (folder / "guess.py").write_text(source)
    (jobs,) = planned_jobs(folder, [{"model": "tiny", "site": "local", "set": f"{OWN} {change}"}])
    (job,) = jobs["approve_environment"]
    assert job["settings"]
    return job["settings"]


def test_it_is_there_only_with_an_environment_and_training_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(SOURCE)
    without, with_one = planned_jobs(
        tmp_path, [{"model": "tiny", "site": "local"}, {"model": "tiny", "site": "local", "set": OWN}]
    )
    assert "approve_environment" not in without
    assert "approve_environment" in with_one["train"][0]["after"]


def test_a_changed_file_or_setting_repeats_it(tmp_path: Path) -> None:
    first = settings_with(tmp_path / "first", "")
    assert settings_with(tmp_path / "same", "") == first
    assert settings_with(tmp_path / "other_source", "", SOURCE.replace("0.0", "0.5")) != first
    assert settings_with(tmp_path / "other_limit", "environment.max_turns=3") != first


@pytest.mark.slow
def test_a_run_begun_without_it_plays_it_before_training_goes_on(tmp_path: Path) -> None:
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", {})
    config = {"model": "tiny", "recipe": "calculator"}
    workflow.run("approve_environment", config=config)
    (check,) = workflow.results.glob("*/environment_check.json")
    assert "approve_environment" not in jobs_of(workflow.dry_run("train", config=config))
    check.unlink()
    receipt_of(check).unlink()
    assert {"approve_environment", "train"} <= jobs_of(workflow.dry_run("train", config=config))
    done = check.parent / "train" / "done.json"
    done.parent.mkdir()
    done.write_text("{}")
    assert "approve_environment" not in jobs_of(workflow.dry_run("train", config=config))

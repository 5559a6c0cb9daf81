"""The rule that trained in version 0.2 had another name: people are told the new one, and jobs that wait still run."""

from __future__ import annotations

import pytest
from tests.support.rejections import assert_rejected
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow
# How a scheduler's job calls Snakemake.
AS_A_JOB = ["-n", "--mode", "remote", "--target-jobs", "train_grpo:", "--allowed-rules", "train_grpo", "--force"]


def test_a_job_that_waited_in_the_queue_meanwhile_trains(workflow: WorkflowFolder) -> None:
    code, output = workflow.attempt("train_grpo", options=["-n"])
    assert code == 1
    assert_rejected(output, "renamed-rule", "write train ", key="rule")
    workflow.dry_run("train")
    (resolved,) = workflow.folder.glob("logs/configs/*.json")
    workflow.environment["POSTTRAIN_RESOLVED"] = str(resolved)
    assert "train_grpo        1\n" in workflow.run(options=AS_A_JOB)

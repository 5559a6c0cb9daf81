"""Samples that are not the policy's: training stops before it learns from them, or goes on and says so."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.support.workflow_runs import WorkflowFolder, run_snakemake

pytestmark = pytest.mark.slow

SHARE = "mismatch/share_of_limit"


def written(metrics: Path) -> str:
    return metrics.read_text() if metrics.exists() else ""


@pytest.mark.faults("slow")
def test_training_stops_or_goes_on_as_it_is_asked(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """FP8 weights give about 0.01 nats: ten thousand times what is allowed here."""
    workflow.settings |= {"trainer.mismatch.quantised": 1e-6, "trainer.mismatch.action": "stop"}
    code, output = workflow.attempt("train")
    assert code != 0
    for words in ("times further apart than expected", "remove train/rollouts/step_000000", "action=warn"):
        assert words in output
    attempts = (workflow.run_folder / "train/attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 1, "another attempt would replay the same samples"
    assert "step 1: trainer and engine are" in json.loads(attempts[0])["reason"]
    metrics = workflow.run_folder / "train/metrics.jsonl"
    assert written(metrics) == "", "no weight was changed"

    workflow.settings["trainer.mismatch.action"] = "warn"
    workflow.run("resolve_config")
    driver = workflow.start("train")
    try:
        while driver.poll() is None and not written(metrics):
            time.sleep(0.2)
        # Beside a training that goes on: Snakemake locks no folder for it.
        choice = [word for word in workflow.command("snapshot")[5:] if word != "snapshot"]
        asked = run_snakemake(workflow.folder, "snapshot", *choice)
        assert asked.returncode == 0, asked.stdout
        output, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 0, output
    page = (workflow.run_folder / "snapshot.html").read_text()
    assert "<b>So far</b>: " in page
    assert "The engine did not sample from the policy" in page
    assert "goes on</td>" in page, "the attempt that runs"
    assert "x its limit" in output, "behind the progress bar"
    assert output.count("times further apart than expected") >= 4, "in every step"
    rows, expected = workflow.metrics(), undisturbed.metrics()
    assert all(row[SHARE] > 1 for row in rows)
    assert [row | {SHARE: 0} for row in rows] == [row | {SHARE: 0} for row in expected]
    assert all(row[SHARE] < 1 for row in expected)

"""A run whose evaluations serve FP8, as on nodes that hold the model in nothing wider."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.store import read_receipt, receipt_of
from posttrain.store.garbage import delete_unused

pytestmark = [pytest.mark.slow, pytest.mark.faults("slow")]


def test_what_came_and_what_was_trained_are_measured_in_fp8(store: Path, tmp_path: Path) -> None:
    """Rollouts are not; the proof of every byte reaches through both; the store keeps what the run has put there."""
    store = Path(shutil.copytree(store, tmp_path / "store", symlinks=True))
    settings = FAST | {"training.num_steps": 2, "rollout.fp8": "false", "evaluation.precision": "fp8"}
    workflow = WorkflowFolder(tmp_path / "work", store, settings)
    workflow.run("all", "verify")
    run, (config,) = workflow.run_folder, store.glob("tiny/*/export_fp8-*/config.json")
    exported = config.parent
    (quantised,) = (path.parent for path in exported.parent.glob("rollout_fp8-*/config.json"))
    for when, folder in {"before": quantised, "after": exported}.items():
        measured = json.loads((run / "evaluation" / f"{when}.json").read_text())
        assert measured["precision"] == "fp8"
        assert measured["inputs"]["checkpoint"] == read_receipt(receipt_of(folder)).digest
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
        served = (run / "evaluation" / f"{when}.engines" / "engine0.log").read_text()
        assert f"loaded {folder}" in served
    assert read_receipt(receipt_of(exported)).inputs == {"hf_export": read_receipt(receipt_of(run / "hf")).digest}
    assert "temperature 1, weights in FP8" in (run / "report.html").read_text()
    assert "export_fp8" in (run / "verified.json").read_text()
    assert "Nothing to be done" in workflow.dry_run()
    delete_unused(store, unused_days=0)
    assert exported.exists()
    shutil.rmtree(run)
    delete_unused(store, unused_days=0)
    assert not exported.exists()

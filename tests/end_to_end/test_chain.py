"""The whole chain on the small model: every step, its results, and that nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.branches import jobs_of
from tests.support.chromium import measure_pages
from tests.support.workflow_runs import WorkflowFolder

from posttrain.store import receipt_of

pytestmark = pytest.mark.slow


def test_numbers_of_a_run(undisturbed: WorkflowFolder) -> None:
    summary = undisturbed.summary
    assert summary["num_steps"] == 4
    assert 0.05 < summary["pass_rate_before"] < 0.6, "16 prompts only: a coarse check"
    assert summary["mismatch_abs_diff_mean"] <= 1e-3
    assert summary["mismatch_quantised_abs_diff_mean"] > summary["mismatch_abs_diff_mean"]
    assert len(summary["final_weights_sha256"]) == 64
    assert {"make_tiny_model", "train", "evaluate"} <= set(summary["seconds_by_rule"])
    page = (undisturbed.run_folder / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script src" not in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_of_its_report_can_be_read(undisturbed: WorkflowFolder, scheme: str) -> None:
    measured = measure_pages({"report": undisturbed.run_folder / "report.html"}, (1400, 700), scheme)
    assert [result["problems"] for result in measured.values()] == [[], []]
    assert all(result["texts"] >= 100 for result in measured.values())


def test_the_first_and_the_last_step_are_compared_on_the_weights_served(undisturbed: WorkflowFolder) -> None:
    rows = undisturbed.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 < row["mismatch/quantised_abs_diff_mean"] < 0.1 for row in rows), "on the trainer's own, every step is"
    compared = [row for row in rows if "mismatch/abs_diff_mean" in row]
    assert [row["step"] for row in compared] == [1, 4]
    for row in compared:
        assert row["mismatch/abs_diff_mean"] <= 1e-3
        assert row["train/first_update_ratio_max_abs_deviation"] == 0.0, "two passes"
    assert not any("train/first_update_ratio_max_abs_deviation" in row for row in rows[1:3]), "one pass: 1 by itself"


def test_export_has_the_origins_layout(undisturbed: WorkflowFolder) -> None:
    (origin,) = undisturbed.store.glob("tiny/*/hf")
    export = undisturbed.run_folder / "hf"
    index = json.loads((export / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((origin / "model.safetensors.index.json").read_text())["weight_map"]
    before, after = tensors_of(origin), tensors_of(export)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    mtp = {name for name in before if name.startswith("model.layers.4.")}
    frozen = {name for name in before if ".indexer." in name or "e_score_correction_bias" in name}
    assert mtp
    assert not changed & (mtp | frozen), "the MTP layer, the indexer and the router's bias are not trained"
    # Left out: norms (about 1, where a BF16 step is larger than what four updates move) and experts (one may see no
    # token in so short a run).
    matrices = {name for name, tensor in before.items() if tensor.ndim == 2 and ".experts." not in name} - mtp - frozen
    assert matrices <= changed, "training changes every other matrix"
    assert any(".experts." in name for name in changed)


def test_engine_loads_fp8_codes(undisturbed: WorkflowFolder) -> None:
    (fp8,) = undisturbed.store.glob("tiny/*/rollout_fp8-????????")
    codes = {name: tensor.dtype for name, tensor in tensors_of(fp8).items()}
    assert codes["model.layers.1.self_attn.o_proj.weight"] == torch.float8_e4m3fn


def test_a_second_call_does_nothing(finished: WorkflowFolder) -> None:
    assert "Nothing to be done" in finished.run()


def test_one_step_alone_leaves_the_others_untouched(finished: WorkflowFolder) -> None:
    receipts = {path: path.stat().st_mtime_ns for path in finished.store.rglob("*.receipt.json")}
    report = finished.run_folder / "report.html"
    report.unlink()
    output = finished.run("render_report")
    assert report.exists()
    assert "train tiny" not in output, "the training job's message"
    assert receipts == {path: path.stat().st_mtime_ns for path in finished.store.rglob("*.receipt.json")}


@pytest.mark.faults("slow")
def test_weights_that_go_over_disk_train_the_same(undisturbed: WorkflowFolder, workflow: WorkflowFolder) -> None:
    workflow.settings |= {"engine.weight_transport": "disk"}
    workflow.run("train")
    train = workflow.run_folder / "train"
    assert "served_weights/version_000003" in (train / "attempts" / "001" / "engine0.log").read_text()
    assert not (train / "served_weights").exists(), "they are of no use once the engines hold them"
    assert workflow.metrics() == undisturbed.metrics()


@pytest.mark.faults("slow")
@pytest.mark.parametrize(
    ("settings", "is_copied"),
    [
        ({"stage.copy": "nothing"}, False),
        ({"stage.copy": "slices", "site.node_names": "[node0]"}, True),
        ({"stage.broadcast": "bittorrent"}, True),
    ],
    ids=["nothing", "slices", "broadcast"],
)
def test_weights_that_come_to_a_node_in_another_way_train_the_same(
    undisturbed: WorkflowFolder, workflow: WorkflowFolder, settings: dict[str, str], is_copied: bool
) -> None:
    workflow.settings |= settings
    workflow.run("train")
    assert any((workflow.folder / "node_local").rglob("*.distcp")) == is_copied
    assert workflow.metrics() == undisturbed.metrics()


def test_a_checkpoint_that_is_named_is_exported_and_nothing_is_trained(
    undisturbed: WorkflowFolder, workflow: WorkflowFolder
) -> None:
    """Ours stands for another trainer's here; theirs are read in test_other_trainers.py."""
    checkpoint = undisturbed.run_folder / "train" / "checkpoints" / "step_000004"
    workflow.settings |= {"export.checkpoint_folder": checkpoint}
    output = workflow.run("finalize_export_hf")
    assert "train tiny" not in output, "the training job's message"
    exported = workflow.run_folder / "hf"
    planned = jobs_of(workflow.dry_run())
    assert planned
    assert "train" not in planned
    assert exported.parent.name.startswith("exported-")
    for shard in (undisturbed.run_folder / "hf").glob("*.safetensors"):
        assert (exported / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.faults("slow")
def test_other_targets_do_their_work(finished: WorkflowFolder) -> None:
    """Answers alone stand in tests/workflow/test_answers.py, the steps of weights for serving in tests/scripts."""
    finished.run("plan", "check", "benchmark_serving", "finalize_serving", "verify_rollout_weights")
    plan = json.loads((finished.results / "plans" / "tiny-1xcpu.json").read_text())
    assert plan["model"]["num_parameters"] > 250_000
    assert not plan["problems"]
    assert (finished.run_folder / "evaluation" / "serving.json").exists()
    (made,) = (path for path in finished.store.glob("tiny/*/nvfp4-????????") if path.is_dir())
    assert receipt_of(made).exists()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}

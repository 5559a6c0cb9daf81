"""The same trainer with two ranks: under torchrun, and under our supervisor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.listening import RANK, assert_all_known, watched_sockets
from tests.support.replaying import assert_steps_are_repeatable
from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.store import receipt_of

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tensor": {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.expert_model_parallel_size": 2,
    },
    "pipeline": {"parallel.pipeline_model_parallel_size": 2},
}
# In which Megatron and the checkpoint writer put the two ranks, counted once for each.
GLOO_GROUPS = {"tensor": 25 + 25, "pipeline": 25 + 24}
TWO_RANKS = {"hardware.gpus_per_node": 2, "trainer.num_threads": 1, "engine.num_threads": 1}


def compare_first_step(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    """The first rollout is the same, so are its numbers; later steps follow from FP8 codes of other bits.

    Numbers of the trainer include a second update: Adam divides a gradient by its own size, so rounding in gradients
    near zero shows in the fifth digit. The first update alone agrees to 1e-6 (test_layouts.py). The largest difference
    of two engines' log-probabilities is rounding itself, some units in the last place of numbers near ten.
    """
    assert [row["step"] for row in two] == [row["step"] for row in one]
    for name, value in one[0].items():
        if name not in ("train/num_micro_batches", "train/padding_fraction"):
            close = {"rel": 1e-4 if name.startswith("train/") else 1e-6, "abs": 1e-6}
            if name == "mismatch/abs_diff_max":
                close["abs"] = 1e-5
            assert two[0][name] == pytest.approx(value, **close), name
    for row in (two[0], two[-1]):
        assert row["mismatch/abs_diff_mean"] <= 1e-3
        assert row["train/first_update_ratio_max_abs_deviation"] == 0.0


# Two trainers and an engine start.
@pytest.mark.parametrize(
    ("name", "target"),
    [("tensor", "train"), pytest.param("pipeline", "finalize_export_hf", marks=pytest.mark.faults("slow"))],
)
def test_two_ranks_under_the_supervisor(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder, name: str, target: str
) -> None:
    """Meanwhile another user tries every socket; the last steps of one layout are trained again.

    Those of one rank are in test_resume.py.
    """
    workflow.settings |= TWO_RANKS | LAYOUTS[name] | {"logging.keep_rollouts": "true"}
    with watched_sockets(workflow) as found:
        workflow.run(target)
    compare_first_step(undisturbed.metrics(), workflow.metrics())
    assert_all_known(found, GLOO_GROUPS[name])
    assert {"posttrain.rl.engines.embedded", "train.py", RANK} <= {at.program for at in found}
    kept = workflow.run_folder / "train" / "rollouts"
    assert [path.name for path in sorted(kept.iterdir())] == [f"step_{step:06d}" for step in range(4)]
    if name == "pipeline":
        assert_steps_are_repeatable(workflow)


@pytest.mark.faults("slow")
def test_two_ranks_under_torchrun(workflow: WorkflowFolder, undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    """torchrun starts what the supervisor would, against an engine that is there already: expert and data parallel."""
    from posttrain.config.load import load_resolved
    from posttrain.rl.engines.process import running_engines
    from posttrain.rl.engines.secret import SECRET_VARIABLE

    workflow.settings |= TWO_RANKS | {"parallel.expert_model_parallel_size": 2}
    workflow.run("resolve_config", "stage_all_nodes")
    config = load_resolved(workflow.run_folder / "config.resolved.yaml")
    (local,) = (workflow.folder / "node_local/node0/tiny").iterdir()
    (torch_dist,) = local.glob("torch_dist-????????")
    (weights,) = local.glob("rollout_fp8-????????")
    (dataset,) = (folder for folder in workflow.store.glob("datasets/sort_digits-*") if receipt_of(folder).exists())
    train = workflow.run_folder / "train"
    with running_engines(config, weights, tmp_path) as engines:
        arguments = {
            "--config": workflow.run_folder / "config.resolved.yaml",
            "--run-name": workflow.run_folder.name,
            "--run-folder": train,
            "--torch-dist": torch_dist,
            "--model-folder": weights,
            "--dataset": dataset,
            "--engine": engines[0].url,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [str(word) for pair in arguments.items() for word in pair]
        command = [*torchrun, "-m", "posttrain.cluster.trainer_rank", *words]
        environment = {**workflow.env, SECRET_VARIABLE: engines[0].secret}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 0, ended.stderr[-4000:]
    compare_first_step(undisturbed.metrics(), workflow.metrics())
    assert json.loads((train / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4

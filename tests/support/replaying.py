"""A finished training whose last steps are trained again, on the rollouts that it has kept."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader


def assert_steps_are_repeatable(workflow: WorkflowFolder) -> None:
    """The last two steps have the same bits again; one metric that is wrong on purpose is named, and nothing else."""
    train = workflow.run_folder / "train"
    rows = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    loss, rows[2]["train/loss"] = rows[2]["train/loss"], 0.5
    (train / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "posttrain", "replay", f"run={workflow.run_folder.name}"]
    done = subprocess.run(
        [*command, f"set=site.results={workflow.results} site.store={workflow.store}"],
        cwd=workflow.folder, env=workflow.env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = [line.strip() for line in done.stderr.partition("[replay-differs]\n")[2].splitlines()]
    assert (done.returncode, found) == (1, [f"step 3: train/loss 0.5, trained again {loss!r}"]), done.stderr
    wrote, again = (TorchDistReader(folder / "checkpoints/step_000004") for folder in (train, train / "replay"))
    assert wrote.keys == again.keys
    assert not [key for key in wrote.keys if not torch.equal(wrote.read(key), again.read(key))]

"""GRPO training: one job that resumes where it was.

1. Check this node's copy of the weights, and repair it file by file where it is not right.
2. Supervise engines and trainer ranks until the last step is committed.
3. Write the receipt that names the final checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, read_receipt, record_files, require_files, write_receipt
from posttrain.checkpoint.node_local import Origin, ensure_local_copy
from posttrain.cli import run
from posttrain.config.load import load_resolved
from posttrain.launch.supervisor import TrainingJob, supervise
from posttrain.preflight.report import raise_problems
from posttrain.preflight.services import check_wandb
from posttrain.training.checkpoints import CheckpointFolder


def main() -> None:
    """Train, or find that all is done."""
    arguments = parse_arguments()
    started = time.time()
    config = load_resolved(arguments.config)
    raise_problems([check_wandb(config)])
    dataset = require_files(arguments.dataset, arguments.dataset_receipt)
    origins = [
        Origin(arguments.torch_dist, read_receipt(arguments.torch_dist_receipt)),
        Origin(arguments.rollout_weights, read_receipt(arguments.rollout_receipt)),
    ]
    ensure_local_copy(origins, arguments.node_local, arguments.testimony)
    rank_arguments = {
        "--config": arguments.config,
        "--run-name": arguments.run_folder.parent.name,
        "--run-folder": arguments.run_folder,
        "--torch-dist": arguments.node_local / arguments.torch_dist.name,
        "--model-folder": arguments.node_local / arguments.rollout_weights.name,
        "--dataset": arguments.dataset,
    }
    job = TrainingJob(
        config=config,
        run_folder=arguments.run_folder,
        arguments=tuple(str(word) for pair in rank_arguments.items() for word in pair),
        rollout_weights=arguments.node_local / arguments.rollout_weights.name,
    )
    checkpoints = CheckpointFolder(arguments.run_folder / "checkpoints", config.trainer.keep_checkpoints)
    if checkpoints.newest_step() < config.training.num_steps:
        supervise(job)
    final = checkpoints.path(config.training.num_steps)
    receipt = Receipt(
        step="train_grpo",
        files=record_files(
            arguments.run_folder, (f.relative_to(arguments.run_folder).as_posix() for f in final.iterdir())
        ),
        inputs={origin.folder.name: origin.receipt.digest for origin in origins} | {"dataset": dataset.digest},
        settings={
            "experiment": arguments.experiment.read_text(encoding="utf-8"),
            "num_steps": config.training.num_steps,
            "final_checkpoint": final.relative_to(arguments.run_folder).as_posix(),
        },
    )
    write_receipt(arguments.done, receipt, started)


def parse_arguments() -> argparse.Namespace:
    """Read the command line that the rule writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--torch-dist", type=Path, required=True)
    parser.add_argument("--torch-dist-receipt", type=Path, required=True)
    parser.add_argument("--rollout-weights", type=Path, required=True)
    parser.add_argument("--rollout-receipt", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--dataset-receipt", type=Path, required=True)
    parser.add_argument("--node-local", type=Path, required=True)
    parser.add_argument("--testimony", type=Path, required=True)
    parser.add_argument("--done", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

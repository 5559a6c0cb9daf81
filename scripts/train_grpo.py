"""GRPO training: one job that resumes where it was.

1. Supervise engines and trainer ranks until the last step is committed. Before each start, read what they will load,
   and repair this node's copy file by file where it is not right.
2. Write the receipt that names the final checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, read_receipt, record_files, require_files, write_receipt
from posttrain.checkpoint.node_local import Origin
from posttrain.checkpoint.node_weights import NodeWeights
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
    weights = NodeWeights(
        config,
        rank=0,
        name=arguments.node,
        torch_dist=Origin(arguments.torch_dist, read_receipt(arguments.torch_dist_receipt)),
        rollout=Origin(arguments.rollout_weights, read_receipt(arguments.rollout_receipt)),
        destination=arguments.node_local,
        meeting=arguments.run_folder.parent / "node_local" / "broadcast",
    )
    torch_dist, rollout = weights.folder_of(weights.torch_dist), weights.folder_of(weights.rollout)
    checkpoints = CheckpointFolder(arguments.run_folder / "checkpoints", config.trainer.keep_checkpoints)
    rank_arguments = {
        "--config": arguments.config,
        "--run-name": arguments.run_folder.parent.name,
        "--run-folder": arguments.run_folder,
        "--torch-dist": torch_dist,
        "--model-folder": rollout,
        "--dataset": arguments.dataset,
    }
    job = TrainingJob(
        config=config,
        run_folder=arguments.run_folder,
        arguments=tuple(str(word) for pair in rank_arguments.items() for word in pair),
        rollout_weights=rollout,
        prepare=lambda: weights.prepare(with_torch_dist=checkpoints.newest_step() == 0),
    )
    inputs = {origin.folder.name: origin.receipt.digest for origin in (weights.torch_dist, weights.rollout)}
    if arguments.fork:
        inputs["fork"] = read_receipt(arguments.fork).digest
    begun_from = checkpoints.begun_from(inputs | {"dataset": dataset.digest})
    if checkpoints.newest_step() < config.training.num_steps:
        with weights.in_use():
            supervise(job)
    final = checkpoints.path(config.training.num_steps)
    receipt = Receipt(
        step="train_grpo",
        files=record_files(
            arguments.run_folder, (f.relative_to(arguments.run_folder).as_posix() for f in final.iterdir())
        ),
        inputs=begun_from,
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
    parser.add_argument("--node", required=True)
    parser.add_argument("--fork", type=Path, nargs="?", help="receipt of the fork that the run began with, if any")
    parser.add_argument("--done", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

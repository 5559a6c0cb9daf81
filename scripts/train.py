"""Training: one resumable job.

In a pod other than its gang's first, execute the first pod's requests. Otherwise:

1. Supervise engines and trainer ranks on all nodes until the last step is committed. Before each start, every node
verifies its copy of the weights, and repairs invalid files.
2. Write the receipt of metrics and other records, then the final checkpoint's receipt.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.cli import command_line, run
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.site import find_nodes, is_waiting_pod, rendezvous_path
from posttrain.cluster.supervisor import supervise
from posttrain.cluster.worker_pod import lend_this_pod
from posttrain.config.load import load_resolved
from posttrain.plan.preflight.machine import check_open_files
from posttrain.plan.preflight.report import raise_problems
from posttrain.plan.preflight.wandb_key import check_wandb
from posttrain.report.provenance import record_run
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.store import (
    Receipt,
    read_receipt,
    receipt_of,
    record_files,
    records_of,
    require_files,
    suite_folders,
    write_receipt,
)


def main() -> None:
    """Train, unless training is done."""
    arguments, started = parse_arguments(), time.time()
    if is_waiting_pod():
        lend_this_pod(rendezvous_path(arguments.run_folder), arguments.done)
        return
    config = load_resolved(arguments.config)
    raise_problems([check_wandb(config), check_open_files(config)])
    dataset = require_files(arguments.dataset, arguments.dataset_receipt)
    if config.evaluation.interval:
        for folder in suite_folders(config).values():
            require_files(folder, receipt_of(folder))
    rank_arguments = {
        "--run-name": arguments.run_folder.parent.name,
        "--run-folder": arguments.run_folder,
        "--dataset": arguments.dataset,
    }
    if arguments.data_check_receipt:
        require_files(arguments.data_check.parent, arguments.data_check_receipt)
        rank_arguments["--data-check"] = arguments.data_check
    job = TrainingJob(
        config_path=arguments.config,
        run_folder=arguments.run_folder,
        torch_dist=arguments.torch_dist,
        torch_dist_receipt=arguments.torch_dist_receipt,
        rollout_weights=arguments.rollout_weights,
        rollout_receipt=arguments.rollout_receipt,
        node_local=arguments.node_local,
        arguments=tuple(str(word) for pair in rank_arguments.items() for word in pair),
    )
    checkpoints = CheckpointFolder(arguments.run_folder / "checkpoints", config.trainer.keep_checkpoints)
    inputs = {
        arguments.torch_dist.name: read_receipt(arguments.torch_dist_receipt).digest,
        arguments.rollout_weights.name: read_receipt(arguments.rollout_receipt).digest,
        "dataset": dataset.digest,
    }
    if arguments.fork:
        inputs["fork"] = read_receipt(arguments.fork).digest
    begun_from = checkpoints.begun_from(inputs)
    if checkpoints.newest_step() < config.training.num_steps:
        supervise(job, config, find_nodes(config, arguments.run_folder))
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
    root = arguments.run_folder.parent
    write_receipt(records_of(root), Receipt("train_grpo", record_run(root), {"train": receipt.digest}, {}))
    write_receipt(arguments.done, receipt, started)


def parse_arguments() -> argparse.Namespace:
    """Parse the rule's command line."""
    return command_line(
        __doc__,
        experiment=Path,
        config=Path,
        run_folder=Path,
        torch_dist=Path,
        torch_dist_receipt=Path,
        rollout_weights=Path,
        rollout_receipt=Path,
        dataset=Path,
        dataset_receipt=Path,
        data_check=(Path, "what was found in it"),
        data_check_receipt={"type": Path, "nargs": "?", "help": "its receipt; none in a run that was trained without"},
        node_local=(Path, "with {node} for a node's name"),
        fork={"type": Path, "nargs": "?", "help": "receipt of the fork that the run began with, if any"},
        done=Path,
    )


if __name__ == "__main__":
    run(main)

"""Finds the largest activations of experts, for NVFP4: the trainer's own model reads conversations in several passes.

In a pod other than its gang's first, execute the first pod's requests. Otherwise:

1. Start ranks with training's layout on all nodes. Each pass resumes after its last finished shard.
2. Write the receipt of the results: a file per pass, and the number of tokens per expert.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

from posttrain.checkpoint.parts.fill_folder import clear
from posttrain.checkpoint.parts.steps import FOLDER, SOURCE, make_folder
from posttrain.checkpoint.quantization.coverage import STATE_FOLDER, describe_coverage
from posttrain.cli import RESOLVED, command_line, run
from posttrain.cluster.oneshot_job import OneshotJob
from posttrain.cluster.site import is_waiting_pod, rendezvous_path
from posttrain.cluster.worker_pod import lend_this_pod
from posttrain.config.derived import calibrating, calibration_passes, calibration_settings
from posttrain.store import (
    COVERAGE_NAME,
    FileRecord,
    Receipt,
    pass_folders,
    read_json,
    receipt_of,
    record_files,
    require_files,
)


def main() -> None:
    """Calibrate, unless the results exist."""
    args = parse_arguments()
    if is_waiting_pod():
        lend_this_pod(rendezvous_path(args.log_folder), args.receipt)
        return
    config = args.resolved.config
    folders = pass_folders(config)
    inputs = {f"pass {name}": require_files(folder, receipt_of(folder)).digest for name, folder in folders.items()}
    inputs["tokenizer"] = require_files(args.source, args.source_receipt).digest
    weights = require_files(args.weights, args.weights_receipt)
    inputs["weights"] = weights.digest
    # For a trained model, the weights are a checkpoint in the run's folder.
    torch_dist = args.weights / str(weights.settings.get("final_checkpoint", ""))
    wanted = Receipt("calibrate", (), inputs, calibration_settings(config))

    def make(partial: Path) -> tuple[FileRecord, ...]:
        made_from = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        command = {
            "--torch-dist": [torch_dist],
            "--model-folder": [args.source],
            "--conversations": list(folders.values()),
            "--made-from": [made_from],
            "--folder": [partial],
        }
        ranks = dataclasses.replace(args.resolved, config=calibrating(config))
        with OneshotJob.of_this_job(ranks, args.log_folder) as gang:
            gang.run_ranks([str(word) for key, words in command.items() for word in (key, *words)])
        names = [*(f"{name}.safetensors" for name in calibration_passes(config)), COVERAGE_NAME]
        shutil.rmtree(partial / STATE_FOLDER, ignore_errors=True)
        clear(partial, names)
        return record_files(partial, names)

    make_folder(args, wanted, make)
    told = args.folder / COVERAGE_NAME
    print(f"{describe_coverage(read_json(told)['all'])} ({told})")


def parse_arguments() -> argparse.Namespace:
    """Parse the rule's command line."""
    return command_line(
        __doc__,
        **SOURCE,
        **FOLDER,
        resolved=RESOLVED,
        weights=(Path, "torch_dist checkpoint, or train/ of a run"),
        weights_receipt=(Path, "its receipt"),
        log_folder=(Path, "of this job alone; gets the ranks' logs"),
    )


if __name__ == "__main__":
    run(main)

"""Writes one part of the trained model in the layout of a Hub repository, from a distributed checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from posttrain.artifacts import require_files
from posttrain.checkpoint.export import (
    STEP,
    checkpoint_of,
    identify_checkpoint,
    open_export,
    refuse_foreign_folder,
    write_part,
)
from posttrain.checkpoint.parts.parts import write_part_receipt
from posttrain.cli import run
from posttrain.config.schema import Architecture


def main() -> None:
    """Check both sides, write this part's shards, and say so in the part's receipt."""
    args = parse_arguments()
    started = time.time()
    import torch

    torch.set_num_threads(1)
    refuse_foreign_folder(args.destination)
    checkpoint, identity = find_trained(args.run_folder, args.train_receipt)
    inputs = {"train": identity, "hf_patched": require_files(args.origin, args.origin_receipt).digest}
    export = open_export(checkpoint, args.origin, args.architecture)
    shards = write_part(export, inputs, args.destination, args.part, args.num_parts, args.threads)
    write_part_receipt(args.receipt, STEP, args.part, args.num_parts, shards, inputs, started)


def find_trained(run_folder: Path, receipt: Path | None) -> tuple[Path, str]:
    """Return the trained checkpoint and what tells it from others; another trainer's has no receipt."""
    if receipt is None:
        return run_folder, identify_checkpoint(run_folder)
    train = require_files(run_folder, receipt)
    return checkpoint_of(run_folder, train), train.digest


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="a training's folder, or a checkpoint")
    parser.add_argument("--train-receipt", type=Path, help="its receipt (done.json); another trainer's has none")
    parser.add_argument("--origin", type=Path, required=True, help="the checkpoint that training began with")
    parser.add_argument("--origin-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--destination", type=Path, required=True, help="where the model goes")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of this part, written last")
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--num-parts", type=int, required=True, help="number of parts")
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="shards written at a time")
    return parser.parse_args()


def read_architecture(text: str) -> Architecture:
    """Return the dimensions that the workflow passes as JSON."""
    return Architecture(**json.loads(text))


if __name__ == "__main__":
    run(main)

"""Writes the trained model in the layout of a Hub repository, from the trainer's distributed checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from posttrain.artifacts import Receipt, building, require_files, write_receipt
from posttrain.checkpoint.export import (
    STEP,
    checkpoint_of,
    final_weights_sha256,
    finalize_folder,
    open_export,
    refuse_foreign_folder,
    write_shards,
)
from posttrain.cli import run
from posttrain.config.schema import Architecture


def main() -> None:
    """Check both sides, write the shards, give the folder its name, hash the weights, write the receipt."""
    args = parse_arguments()
    started = time.time()
    torch.set_num_threads(1)
    refuse_foreign_folder(args.destination)
    train = require_files(args.run_folder, args.train_receipt)
    inputs = {"train": train.digest, "hf_patched": require_files(args.origin, args.origin_receipt).digest}
    export = open_export(checkpoint_of(args.run_folder, train), args.origin, args.architecture)
    shards = write_shards(export, inputs, args.destination, args.threads)
    args.receipt.unlink(missing_ok=True)
    with building(args.destination) as partial:
        others = finalize_folder(export, partial)
    settings = {"final_weights_sha256": final_weights_sha256(args.destination, args.threads)}
    write_receipt(args.receipt, Receipt(STEP, (*shards, *others), inputs, settings), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="a training's folder, or a checkpoint")
    parser.add_argument("--train-receipt", type=Path, required=True, help="its receipt (done.json)")
    parser.add_argument("--origin", type=Path, required=True, help="the checkpoint that training began with")
    parser.add_argument("--origin-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--destination", type=Path, required=True, help="where the model goes")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the destination, written last")
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="shards written at a time")
    return parser.parse_args()


def read_architecture(text: str) -> Architecture:
    """Return the dimensions that the workflow passes as JSON."""
    return Architecture(**json.loads(text))


if __name__ == "__main__":
    run(main)

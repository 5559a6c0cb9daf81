"""Writes one part of Megatron's distributed checkpoint from a checkpoint in Hub layout."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from posttrain.artifacts import Receipt, claim, require_files
from posttrain.checkpoint.formats.torch_dist import write_part
from posttrain.checkpoint.parts.parts import write_part_receipt
from posttrain.cli import run
from posttrain.config.schema import Architecture

STEP = "convert_hf_to_torch_dist"


def main() -> None:
    """Check the source, copy this part's share of its tensors, and say so in the part's receipt."""
    args = parse_arguments()
    started = time.time()
    import torch

    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    inputs = {"hf_patched": source.digest}
    settings = {"part": args.part, "num_parts": args.num_parts}
    if not claim(args.receipt, Receipt(STEP, (), inputs, settings), args.folder):
        return
    files = write_part(
        args.source, source.digest, args.folder, args.architecture, args.part, args.num_parts, args.threads
    )
    write_part_receipt(args.receipt, STEP, args.part, args.num_parts, files, inputs, started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the torch_dist folder")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of this part, written last")
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--num-parts", type=int, required=True, help="number of parts")
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="files written at a time")
    return parser.parse_args()


def read_architecture(text: str) -> Architecture:
    """Return the dimensions that the workflow passes as JSON."""
    return Architecture(**json.loads(text))


if __name__ == "__main__":
    run(main)

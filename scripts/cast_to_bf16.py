"""Writes one part of a BF16 checkpoint from a quantised one."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from posttrain.artifacts import Receipt, claim, require_files
from posttrain.checkpoint.dequantize import CastToBf16
from posttrain.checkpoint.parts import write_part_receipt
from posttrain.checkpoint.recoded_folder import write_part
from posttrain.cli import run

STEP = "cast_to_bf16"


def main() -> None:
    """Check the source, cast this part's share of the shards, and say so in the part's receipt."""
    args = parse_arguments()
    started = time.time()
    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    inputs = {"hf": source.digest}
    settings = {"part": args.part, "num_parts": args.num_parts}
    if not claim(args.receipt, Receipt(STEP, (), inputs, settings), args.folder):
        return
    recoding = CastToBf16(args.source)
    files = write_part(recoding, source.digest, args.folder, args.part, args.num_parts, args.threads)
    write_part_receipt(args.receipt, STEP, args.part, args.num_parts, files, inputs, started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="quantised checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the folder")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of this part, written last")
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--num-parts", type=int, required=True, help="number of parts")
    parser.add_argument("--threads", type=int, default=1, help="shards written at a time")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

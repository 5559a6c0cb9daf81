"""Writes a checkpoint with NVFP4 experts from a BF16 checkpoint in Hub layout."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from posttrain.artifacts import Receipt, building, require_files, write_receipt
from posttrain.checkpoint.nvfp4_folder import finalize_folder, write_shards
from posttrain.cli import run

STEP = "quantize_nvfp4"


def main() -> None:
    """Check the source, quantise the experts, write config and index, write the receipt."""
    args = parse_arguments()
    started = time.time()
    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    shards = write_shards(args.source, source.digest, args.folder, args.threads)
    args.receipt.unlink(missing_ok=True)
    with building(args.folder) as partial:
        others = finalize_folder(args.source, partial)
    inputs = {"hf_patched": source.digest}
    write_receipt(args.receipt, Receipt(STEP, (*shards, *others), inputs, {"strategy": "nvfp4"}), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="BF16 checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the NVFP4 folder")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the folder, written last")
    parser.add_argument("--threads", type=int, default=1, help="shards written at a time")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

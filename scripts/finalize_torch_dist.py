"""Makes the parts of Megatron's distributed checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, record_files, require_files, write_receipt
from posttrain.checkpoint.formats.torch_dist import FORMAT_FILES, verify_torch_dist, write_format_files
from posttrain.checkpoint.parts.parts import read_parts, remove_strangers
from posttrain.cli import run
from posttrain.config.schema import Architecture

STEP = "finalize_torch_dist"
PART_STEP = "convert_hf_to_torch_dist"


def main() -> None:
    """Check the parts, write the metadata, compare everything with the source if asked, write the receipt."""
    args = parse_arguments()
    started = time.time()
    import torch

    torch.set_num_threads(1)
    inputs = {"hf_patched": require_files(args.source, args.source_receipt).digest}
    parts = read_parts(args.folder, args.part_receipts, PART_STEP, inputs)
    wanted = Receipt(STEP, tuple(part.record for part in parts.values()), inputs, {})
    if not claim(args.receipt, wanted, args.folder, parts=args.part_receipts):
        return
    with building(args.folder) as partial:
        write_format_files(partial, parts, args.architecture)
        remove_strangers(partial, keep={*parts, *FORMAT_FILES})
        format_records = record_files(partial, FORMAT_FILES)
        if args.verify:
            verify_torch_dist(args.source, partial, args.architecture, args.threads)
    records = (*format_records, *(part.record for part in parts.values()))
    write_receipt(args.receipt, Receipt(STEP, records, inputs, {}), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--part-receipts", type=Path, nargs="+", required=True, help="receipts of all parts")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the torch_dist folder")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the folder, written last")
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--verify", action="store_true", help="read everything again and compare it bit by bit")
    parser.add_argument("--threads", type=int, default=1, help="tensors compared at a time")
    return parser.parse_args()


def read_architecture(text: str) -> Architecture:
    """Return the dimensions that the workflow passes as JSON."""
    return Architecture(**json.loads(text))


if __name__ == "__main__":
    run(main)

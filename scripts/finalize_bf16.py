"""Makes the parts of a BF16 checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.dequantize import CastToBf16
from posttrain.checkpoint.parts import read_parts
from posttrain.checkpoint.recoded_folder import finalize_folder
from posttrain.cli import run

STEP = "finalize_bf16"
PART_STEP = "cast_to_bf16"


def main() -> None:
    """Check the parts, write index and config, copy the tokenizer, write the receipt."""
    args = parse_arguments()
    started = time.time()
    inputs = {"hf": require_files(args.source, args.source_receipt).digest}
    parts = read_parts(args.folder, args.part_receipts, PART_STEP, inputs)
    recoding = CastToBf16(args.source)
    wanted = Receipt(STEP, tuple(part.record for part in parts.values()), inputs, dict(recoding.settings))
    if not claim(args.receipt, wanted, args.folder, parts=args.part_receipts):
        return
    with building(args.folder) as partial:
        records = finalize_folder(recoding, partial, parts)
    write_receipt(args.receipt, Receipt(STEP, records, inputs, dict(recoding.settings)), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="quantised checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--part-receipts", type=Path, nargs="+", required=True, help="receipts of all parts")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the folder")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the folder, written last")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

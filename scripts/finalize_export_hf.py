"""Makes the parts of an exported model one checkpoint in Hub layout, and gives the folder its name."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, read_receipt, require_files, write_receipt
from posttrain.checkpoint.export import FINALIZE_STEP, STEP, combine_hashes, finalize_folder
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.parts.parts import read_parts
from posttrain.cli import run


def main() -> None:
    """Check the parts, add index, config and tokenizer, give the folder its name, write the receipt."""
    args = parse_arguments()
    started = time.time()
    origin = require_files(args.origin, args.origin_receipt)
    inputs = {**read_receipt(args.part_receipts[0]).inputs, "hf_patched": origin.digest}
    parts = read_parts(args.destination, args.part_receipts, STEP, inputs)
    args.receipt.unlink(missing_ok=True)
    with building(args.destination) as partial:
        others = finalize_folder(CheckpointReader(args.origin), parts, partial)
    records = (*(part.record for part in parts.values()), *others)
    settings = {"final_weights_sha256": combine_hashes(parts.values())}
    write_receipt(args.receipt, Receipt(FINALIZE_STEP, records, inputs, settings), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--origin", type=Path, required=True, help="the checkpoint that training began with")
    parser.add_argument("--origin-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--part-receipts", type=Path, nargs="+", required=True, help="receipts of all parts")
    parser.add_argument("--destination", type=Path, required=True, help="where the model goes")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the destination, written last")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

"""Make the parts of a download one checkpoint: nothing is missing, config, index and headers fit together."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, write_receipt
from posttrain.checkpoint.formats.hf_layout import check_source
from posttrain.checkpoint.hub.download_parts import join_parts, origin_of, remove_other_parts, set_aside
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.cli import run

STEP = "finalize_hf_checkpoint"


def main() -> None:
    """Hold the parts against the list, check the layout, give the folder its name, write the receipt."""
    args, started = parse_arguments(), time.time()
    manifest = read_manifest(args.manifest)
    files = join_parts(args.folder, args.part_receipts, manifest)
    inputs, settings = origin_of(manifest)
    if not claim(args.receipt, Receipt(STEP, files, inputs, settings), args.folder, parts=args.part_receipts):
        return
    with building(args.folder) as partial:
        set_aside(partial, args.folder.with_name(f"{args.folder.name}.not_needed"), {file.path for file in files})
        check_source(partial)
    remove_other_parts(args.folder, args.part_receipts)
    write_receipt(args.receipt, Receipt(STEP, files, inputs, settings), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", required=True, type=Path, help="what list_hf_checkpoint wrote")
    parser.add_argument("--part-receipts", type=Path, nargs="+", required=True, help="receipts of all parts")
    parser.add_argument("--folder", required=True, type=Path, help="final name of the checkpoint's folder")
    parser.add_argument("--receipt", required=True, type=Path, help="receipt of the folder, written last")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

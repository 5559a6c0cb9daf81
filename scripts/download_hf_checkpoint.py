"""Bring one part of a checkpoint's files into the store: from the Hub, or from a local folder; every one verified."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, claim, write_receipt
from posttrain.checkpoint.hub.client import FetchOptions
from posttrain.checkpoint.hub.download_parts import PART_STEP, bring_part, origin_of, reopen
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.cli import run


def main() -> None:
    """Keep what is right, bring the rest, write the part's receipt."""
    args, started = parse_arguments(), time.time()
    manifest = read_manifest(args.manifest)
    inputs, _ = origin_of(manifest)
    settings = {"part": args.part, "num_parts": args.num_parts, "manifest": manifest.digest}
    if not claim(args.receipt, Receipt(PART_STEP, (), inputs, settings), args.folder):
        return
    options = FetchOptions(args.num_workers, bool(args.xet), RetryRule(args.num_retries))
    files = bring_part(manifest, args.part, args.num_parts, reopen(args.folder), options)
    write_receipt(args.receipt, Receipt(PART_STEP, files, inputs, settings), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", required=True, type=Path, help="what list_hf_checkpoint wrote")
    parser.add_argument("--folder", required=True, type=Path, help="where the checkpoint goes")
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--num-parts", type=int, required=True, help="number of parts")
    parser.add_argument("--num-workers", type=int, default=FetchOptions.num_workers, help="files handled at a time")
    parser.add_argument("--num-retries", type=int, default=RetryRule.num_retries, help="failed attempts in a row")
    parser.add_argument("--xet", type=int, choices=(0, 1), default=0, help="1: the library's transfer, with Xet")
    parser.add_argument("--receipt", required=True, type=Path, help="receipt of this part, written last")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

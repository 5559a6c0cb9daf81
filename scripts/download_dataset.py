"""Make the dataset of a run: prompts to train on and prompts held out, checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, manifest_of, write_receipt
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.cli import run
from posttrain.config.schema import Data
from posttrain.data.dataset_files import make_dataset


def main() -> None:
    """Generate, read or fetch the rows, write both files and the receipt."""
    args, started = parse_arguments(), time.time()
    settings = dataclasses.asdict(args.data)
    sources = [Path(args.data.train_file), Path(args.data.heldout_file)] if args.data.kind == "jsonl" else []
    if not claim(args.receipt, Receipt("download_dataset", (), {}, settings), args.folder, sources):
        return
    with building(args.folder) as partial:
        files = make_dataset(args.data, partial, manifest_of(args.folder), RetryRule(args.num_retries))
    write_receipt(args.receipt, Receipt("download_dataset", files, {}, settings), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=data_section, help="the section `data` as JSON")
    parser.add_argument("--folder", required=True, type=Path, help="where the dataset goes")
    parser.add_argument("--num-retries", type=int, default=RetryRule.num_retries, help="failed attempts in a row")
    parser.add_argument("--receipt", required=True, type=Path)
    return parser.parse_args()


def data_section(text: str) -> Data:
    """Return the typed section."""
    return Data(**json.loads(text))


if __name__ == "__main__":
    run(main)

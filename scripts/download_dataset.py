"""Make the dataset of a run: prompts to train on and prompts held out, checked."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, manifest_of, write_receipt
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.cli import RESOLVED, command_line, run
from posttrain.data.dataset_files import make_dataset


def main() -> None:
    """Generate, read or fetch the rows, write both files and the receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        folder=(Path, "where the dataset goes"),
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
        receipt=Path,
    )
    data = args.resolved.config.data
    settings = dataclasses.asdict(data)
    sources = [Path(data.train_file), Path(data.heldout_file)] if data.kind == "jsonl" else []
    if not claim(args.receipt, Receipt("download_dataset", (), {}, settings), args.folder, sources):
        return
    with building(args.folder) as partial:
        files = make_dataset(data, partial, manifest_of(args.folder), RetryRule(args.num_retries))
    write_receipt(args.receipt, Receipt("download_dataset", files, {}, settings), started)


if __name__ == "__main__":
    run(main)

"""Check prompts, labels, tokenizer and graders together before training."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.cli import RESOLVED, command_line, run
from posttrain.errors import raise_if_any
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import HELDOUT, TRAIN
from posttrain.rl.evaluation.data_check import check_data, print_check
from posttrain.rl.evaluation.heldout import read_suites
from posttrain.store import (
    Receipt,
    receipt_of,
    record_files,
    require_files,
    suite_folders,
    write_json,
    write_receipt,
)


def main() -> None:
    """Check the data, print the result, and write it unless there are problems."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, with its tokenizer"),
        dataset=(Path, "folder with train.jsonl and heldout.jsonl"),
        dataset_receipt=Path,
        output=(Path, "the result, as JSON; its receipt is written last"),
    )
    dataset = require_files(args.dataset, args.dataset_receipt)
    train, heldout = (load_prompts(args.dataset / name) for name in (TRAIN, HELDOUT))
    config, suites = args.resolved.config, suite_folders(args.resolved.config)
    receipts = {f"suite {name}": require_files(folder, receipt_of(folder)) for name, folder in suites.items()}
    found = check_data(config, args.checkpoint, train, heldout, read_suites(config, suites))
    print_check(found)
    raise_if_any(found.problems)
    inputs = {"dataset": dataset.digest, **{name: receipt.digest for name, receipt in receipts.items()}}
    receipt_of(args.output).unlink(missing_ok=True)  # of the result that this one replaces
    write_json(args.output, {**found.as_dict(), "inputs": inputs})
    files = record_files(args.output.parent, [args.output.name])
    write_receipt(receipt_of(args.output), Receipt("approve_data", files, inputs, {}), started)


if __name__ == "__main__":
    run(main)

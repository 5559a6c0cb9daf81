"""Play scripted agents in the environment before training, and refuse one that pays cheats."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.cli import RESOLVED, command_line, run
from posttrain.errors import raise_if_any
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import TRAIN
from posttrain.rl.evaluation.environment_check import check_environment, print_environment_check
from posttrain.store import Receipt, receipt_of, record_files, require_files, write_json, write_receipt


def main() -> None:
    """Play the agents, print what they earned, and write it unless there are problems."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, with its tokenizer"),
        dataset=(Path, "folder with train.jsonl"),
        dataset_receipt=Path,
        output=(Path, "the result, as JSON; its receipt is written last"),
    )
    dataset, config = require_files(args.dataset, args.dataset_receipt), args.resolved.config
    found = check_environment(config, args.checkpoint, load_prompts(args.dataset / TRAIN))
    print_environment_check(found)
    raise_if_any(found.problems)
    receipt_of(args.output).unlink(missing_ok=True)  # of the result that this one replaces
    write_json(args.output, found.as_dict())
    files, inputs = record_files(args.output.parent, [args.output.name]), {"dataset": dataset.digest}
    settings = {"environment": config.data.environment, "digest": config.environment.digest}
    write_receipt(receipt_of(args.output), Receipt("approve_environment", files, inputs, settings), started)


if __name__ == "__main__":
    run(main)

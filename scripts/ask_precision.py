"""Query the engines of one precision for its comparison with others: responses and likeliest tokens."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.suites import HELD_OUT
from posttrain.plan.sizing.evaluation import serving_config
from posttrain.plan.sizing.precisions import precision_config
from posttrain.rl.evaluation.heldout import read_eval_tasks
from posttrain.store import (
    Receipt,
    receipt_of,
    record_files,
    require_files,
    suite_folders,
    write_receipt,
)
from posttrain_serving.precision.precisions import ask, read_said, tokens_of, write_said


def main() -> None:
    """Check the inputs, query the engines, and write the results and their receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        precision=(str, "what the checkpoint is called among those that are compared"),
        checkpoint=(Path, "in Hub layout"),
        checkpoint_receipt=Path,
        original={"type": Path, "help": "what the original's engines said; by default these are the original's"},
        dataset=(Path, "folder with heldout.jsonl"),
        dataset_receipt=Path,
        output=(Path, "what was said, as JSON; its receipt is written last"),
    )
    config = serving_config(precision_config(args.resolved.config, args.precision))
    checkpoint = require_content(args.checkpoint, args.checkpoint_receipt, config.stage.workers)
    inputs = {"checkpoint": checkpoint.digest, "dataset": require_files(args.dataset, args.dataset_receipt).digest}
    suites = suite_folders(config)
    inputs |= {f"suite {name}": require_files(folder, receipt_of(folder)).digest for name, folder in suites.items()}
    given = ()
    if args.original:
        inputs["original"] = require_files(args.original.parent, receipt_of(args.original)).digest
        given = read_said(args.original)[0].samples
    eval_tasks = read_eval_tasks(config, {HELD_OUT: args.dataset, **suites})
    said = ask(config, args.precision, args.checkpoint, eval_tasks, args.output.with_suffix(".engines"), given)
    receipt_of(args.output).unlink(missing_ok=True)  # of the results that these replace
    write_said(said, args.output, checkpoint.digest)
    files = record_files(args.output.parent, [args.output.name, tokens_of(args.output).name])
    settings = {"precision": args.precision}
    write_receipt(receipt_of(args.output), Receipt("ask_precision", files, inputs, settings), started)
    print(f"{args.precision}: {said.tokens_per_second:,.0f} tokens/s by {said.engine} on {said.nodes} node(s)")


if __name__ == "__main__":
    run(main)

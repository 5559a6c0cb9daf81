"""Measure a checkpoint on the held-out prompts and suites: serve it, sample, grade, write the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.suites import HELD_OUT
from posttrain.plan.sizing.evaluation import serving_config
from posttrain.rl.evaluation.heldout import evaluate_checkpoint, read_eval_tasks
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
    """Check the inputs, evaluate, and write the result and its receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, BF16 or FP8"),
        checkpoint_receipt=Path,
        dataset=(Path, "folder with heldout.jsonl"),
        dataset_receipt=Path,
        when={"required": True, "choices": ("before", "after"), "help": "before or after training"},
        output=(Path, "the result, as JSON; its receipt is written last"),
    )
    config = serving_config(args.resolved.config)
    checkpoint = require_content(args.checkpoint, args.checkpoint_receipt, config.stage.workers)
    dataset = require_files(args.dataset, args.dataset_receipt)
    suites = suite_folders(config)
    eval_tasks = read_eval_tasks(config, {HELD_OUT: args.dataset, **suites})
    receipts = {f"suite {name}": require_files(folder, receipt_of(folder)) for name, folder in suites.items()}
    log_folder = args.output.parent / f"{args.when}.engines"
    results = evaluate_checkpoint(config, args.checkpoint, eval_tasks, log_folder)
    inputs = {"checkpoint": checkpoint.digest, "dataset": dataset.digest}
    inputs |= {name: receipt.digest for name, receipt in receipts.items()}
    heldout, of_suites = results[HELD_OUT], {name: results[name] for name in suites}
    precision = "fp8" if config.rollout.fp8 else "source"
    measured = {
        "when": args.when,
        "precision": precision,
        **heldout,
        **({"suites": of_suites} if suites else {}),
        "inputs": inputs,
    }
    receipt_of(args.output).unlink(missing_ok=True)  # of the result that this one replaces
    write_json(args.output, measured)
    files = record_files(args.output.parent, [args.output.name])
    write_receipt(receipt_of(args.output), Receipt("evaluate", files, inputs, {"when": args.when}), started)
    print(f"{args.when} training: {in_words(heldout)}")
    for name, result in of_suites.items():
        print(f"  {name}: {in_words(result)}")


def in_words(result: Mapping[str, Any]) -> str:
    """Return an evaluation as one line."""
    return (
        f"{result['pass_rate']:.1%} of {result['num_responses']:,} responses pass, {result['pass_at_k']:.1%} of "
        f"{result['num_prompts']:,} prompts with at least one of {result['num_samples']}; "
        f"{result['response_tokens_mean']:.1f} tokens on average, {result['truncated_fraction']:.1%} cut off; "
        f"{result['tokens_per_second']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    run(main)

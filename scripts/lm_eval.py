"""Evaluate a checkpoint on tasks of lm-eval: serve it, run lm-eval, write the results."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.errors import raise_if_any
from posttrain.plan.preflight.lm_eval import find_lm_eval_problems
from posttrain.plan.sizing.evaluation import serving_config
from posttrain.rl.evaluation.lm_eval import evaluate_with_lm_eval
from posttrain.store import Receipt, building, partial_of, receipt_of, record_files, write_json, write_receipt


def main() -> None:
    """Check the inputs, evaluate, and write the result and its receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, BF16 or FP8"),
        checkpoint_receipt=Path,
        output=(Path, "the result, as JSON, beside lm-eval's own records; its receipt is written last"),
    )
    config = serving_config(args.resolved.config)
    wanted = config.evaluation.lm_eval
    raise_if_any(list(find_lm_eval_problems(config)))
    checkpoint = require_content(args.checkpoint, args.checkpoint_receipt, config.stage.workers)
    records = args.output.with_suffix("")
    # Records of an earlier attempt would be mistaken for this one's; without a receipt they may be deleted.
    receipt_of(args.output).unlink(missing_ok=True)
    for left in (records, partial_of(records)):
        shutil.rmtree(left, ignore_errors=True)
    log_folder = args.output.with_suffix(".engines")
    with building(records) as folder:
        found = evaluate_with_lm_eval(config, args.resolved.run, args.checkpoint, folder, log_folder)
    inputs = {"checkpoint": checkpoint.digest}
    asked = dataclasses.asdict(wanted)
    write_json(args.output, {"when": wanted.when, "asked": asked, "results": found, "inputs": inputs})
    names = [args.output.name, *(path.relative_to(args.output.parent).as_posix() for path in sorted(records.iterdir()))]
    files = record_files(args.output.parent, names)
    write_receipt(receipt_of(args.output), Receipt("lm_eval", files, inputs, {"when": wanted.when}), started)
    print(in_words(found))


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table, one line each."""
    head = ("task", "metric", "filter", "value", "stderr")
    cells = [head, *(tuple(_shown(row[name]) for name in head) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    run(main)

"""Compare a trained model with its quantised versions: score, KL, memory and speed, and which one to deploy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.deployment import ORIGINAL
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.store import receipt_of, require_files, write_json
from posttrain_serving.precision.deployment import Measured, lost_points, table_of, verdict
from posttrain_serving.precision.divergence import CheckpointLogprobs, divergence, truncated_divergence
from posttrain_serving.precision.precisions import NUM_LIKELIEST, EngineLogprobs, read_said


def main() -> None:
    """Compare each checkpoint's engines and weights with the first one's; print and write the table."""
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        original_receipt=(Path, "of the first of the checkpoints"),
        checkpoints={"nargs": "+", "type": Path, "required": True, "help": "a folder of each precision"},
        said={"nargs": "+", "type": Path, "required": True, "help": "what engines said with each"},
        output=(Path, "all numbers, as JSON; written last"),
    )
    config: Config = args.resolved.config
    receipts = [args.original_receipt, *map(receipt_of, args.checkpoints[1:])]
    said, folders, digests = list[EngineLogprobs](), dict[str, Path](), dict[str, str]()
    for folder, receipt, path in zip(args.checkpoints, receipts, args.said, strict=True):
        digest = require_content(folder, receipt, config.stage.workers).digest
        require_files(path.parent, receipt_of(path))
        found, spoke = read_said(path)
        if spoke != digest:
            raise CheckpointError(
                "answers-of-another-checkpoint",
                f"{path} comes from {spoke[:12]}, {folder} is {digest[:12]}: delete {path}",
            )
        said.append(found)
        folders[found.precision], digests[found.precision] = folder, digest
    measured = compare(said, folders)
    print_table(measured)
    best, sentence = verdict(measured, config.evaluation.deployment)
    print(sentence)
    print("KL is that of weights alone: activations stay in FP32")
    print(
        f"engines' KL is that of weights and kernels, at least: by the {NUM_LIKELIEST} likeliest tokens of each engine"
    )
    for one in measured:
        if one.engine == "embedded" and one.divergence:
            print(
                f"{one.precision} is served by the embedded engine, its codes as numbers: other engines' speed differs"
            )
    compared = [one.as_dict() | {"checkpoint": digests[one.precision]} for one in measured]
    write_json(args.output, {"deploy": best, "because": sentence, "precisions": compared})


def compare(said: Sequence[EngineLogprobs], folders: Mapping[str, Path]) -> list[Measured]:
    """Return a row for each precision, starting with the original."""
    import torch

    first, rows = said[0], []
    assert first.precision == ORIGINAL, first.precision
    device = "cuda" if torch.cuda.is_available() else "cpu"
    original = CheckpointLogprobs(folders[ORIGINAL], first.samples, device)
    for one in said:
        passed = [ok for responses in one.passed.values() for _, ok in responses]
        far = engines = None
        if one is not first:
            if one.samples != first.samples:
                raise CheckpointError(
                    "answers-to-other-responses",
                    f"{one.precision} and {ORIGINAL} used different responses: run ask_precision again for both",
                )
            far = divergence(original, CheckpointLogprobs(folders[one.precision], first.samples, device))
            engines = truncated_divergence(first.likeliest, one.likeliest)
        lost = lost_points(first.passed, one.passed)
        rate, cost = sum(passed) / len(passed), (one.engine_gib, one.tokens_per_second)
        rows.append(Measured(one.precision, rate, *lost, far, engines, one.engine, *cost))
    return rows


def print_table(measured: Sequence[Measured]) -> None:
    """Print a row for each precision."""
    head, rows = table_of(measured)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)


if __name__ == "__main__":
    run(main)

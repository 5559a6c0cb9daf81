"""Get rows that are not trained on (a suite's prompts or a pass's conversations), and check every line."""

from __future__ import annotations

from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import FOLDER, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.suites import data_of, rows_of
from posttrain.rl.data.dataset_files import make_rows
from posttrain.rl.data.raw_rows import local_files
from posttrain.store import Receipt, manifest_of
from posttrain.store.data_folders import PASS, SUITE, wanted_rows


def main() -> None:
    """Generate, read or fetch the rows, write them and their receipt."""
    args = command_line(
        __doc__,
        **FOLDER,
        resolved=RESOLVED,
        kind={"required": True, "choices": (SUITE, PASS), "help": "of evaluation.suites, or of serving.passes"},
        name=(str, "its name there"),
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
    )
    rows, kept = wanted_rows(args.resolved.config, args.kind)[args.name], manifest_of(args.folder)
    make_folder(
        args,
        Receipt(f"download_{args.kind}", (), {}, rows_of(rows)),
        lambda partial: make_rows(rows, partial, kept, RetryRule(args.num_retries)),
        local_files(data_of(rows)),
    )


if __name__ == "__main__":
    run(main)

"""Get the prompts of an evaluation suite and check every line."""

from __future__ import annotations

from posttrain.artifacts import Receipt, manifest_of
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import FOLDER, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.suites import rows_of, suite_data
from posttrain.data.dataset_files import make_suite
from posttrain.data.raw_rows import local_files


def main() -> None:
    """Read or fetch the rows, write the prompts and the receipt."""
    args = command_line(
        __doc__,
        **FOLDER,
        resolved=RESOLVED,
        suite=(str, "its name in evaluation.suites"),
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
    )
    suite = args.resolved.config.evaluation.suites[args.suite]
    wanted, kept = Receipt("download_suite", (), {}, rows_of(suite)), manifest_of(args.folder)
    make_folder(
        args,
        wanted,
        lambda partial: make_suite(suite, partial, kept, RetryRule(args.num_retries)),
        local_files(suite_data(suite)),
    )


if __name__ == "__main__":
    run(main)

"""Get the conversations of a calibration pass and check every line."""

from __future__ import annotations

import dataclasses

from posttrain.artifacts import Receipt, manifest_of
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import FOLDER, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.calibration import pass_data
from posttrain.data.dataset_files import make_pass
from posttrain.data.raw_rows import local_files


def main() -> None:
    """Make, read or fetch the rows, write the conversations and the receipt."""
    args = command_line(
        __doc__,
        **FOLDER,
        resolved=RESOLVED,
        name=(str, "of the pass in serving.passes"),
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
    )
    wanted = args.resolved.config.serving.passes[args.name]
    receipt, kept = Receipt("download_pass", (), {}, dataclasses.asdict(wanted)), manifest_of(args.folder)
    make_folder(
        args,
        receipt,
        lambda partial: make_pass(wanted, partial, kept, RetryRule(args.num_retries)),
        local_files(pass_data(wanted)),
    )


if __name__ == "__main__":
    run(main)

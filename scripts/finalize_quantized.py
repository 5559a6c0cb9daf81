"""Joins the parts of a recoded checkpoint, and renames its folder."""

from __future__ import annotations

from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import CALIBRATION, JOIN, SOURCE, join_parts, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.derived import recoding_settings
from posttrain.store.weight_formats import recoding_of


def main() -> None:
    """Join the parts: index, config, tokenizer, receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **JOIN,
        resolved=RESOLVED,
        step=(str, "of the parts: what the format is for"),
        calibration=CALIBRATION,
    )
    settings = {**recoding_settings(args.resolved.config, args.step), "calibration": args.calibration}
    recoding = recoding_of(args.step)
    inputs = source_of(args, recoding.source)
    making = RecodedFolder(open_recoding(args.source, settings), inputs[recoding.source])
    join_parts(recoding.finalize_step, recoding.step, args, inputs, making)


if __name__ == "__main__":
    run(main)

"""Writes one part of a checkpoint in another number format: FP8, a serving format, or BF16 again."""

from __future__ import annotations

from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import CALIBRATION, PART, SOURCE, make_part, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.derived import recoding_settings
from posttrain.store.weight_formats import recoding_of


def main() -> None:
    """Recode this part's shards; a newer calibration repeats it."""
    args = command_line(
        __doc__,
        **SOURCE,
        **PART,
        resolved=RESOLVED,
        step=(str, "of the parts: what the format is for"),
        calibration=CALIBRATION,
    )
    settings = {**recoding_settings(args.resolved.config, args.step), "calibration": args.calibration}
    recoding = recoding_of(args.step)
    inputs = source_of(args, recoding.source)
    make_part(
        recoding.step,
        args,
        inputs,
        lambda: RecodedFolder(open_recoding(args.source, settings), inputs[recoding.source]),
        args.calibration,
    )


if __name__ == "__main__":
    run(main)

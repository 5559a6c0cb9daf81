"""Writes one part of a checkpoint whose numbers are in another format: FP8, a format for serving, or back in BF16."""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts.recodings import recoding_of
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import PART, SOURCE, make_part, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.derived import recoding_settings


def main() -> None:
    """Recode this part's share of the shards; a newer calibration makes it again."""
    args = command_line(
        __doc__,
        **SOURCE,
        **PART,
        resolved=RESOLVED,
        step=(str, "of the parts: what the format is for"),
    )
    settings = recoding_settings(args.resolved.config, args.step)
    recoding = recoding_of(args.step)
    inputs = source_of(args, recoding.source)
    calibration = [Path(file) for file in settings.get("calibration", ())]
    make_part(
        recoding.step,
        args,
        inputs,
        lambda: RecodedFolder(open_recoding(args.source, settings), inputs[recoding.source]),
        calibration,
    )


if __name__ == "__main__":
    run(main)

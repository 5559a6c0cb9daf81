"""Writes one part of a checkpoint whose numbers are in another format: FP8, a format for serving, or back in BF16."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.artifacts.recodings import recoding_of
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import PART, SOURCE, make_part, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import command_line, run


def main() -> None:
    """Recode this part's share of the shards; a newer calibration makes it again."""
    args = command_line(
        __doc__,
        **SOURCE,
        **PART,
        settings=(json.loads, "format and its settings, as JSON"),
    )
    recoding = recoding_of(args.settings["format"])
    inputs = source_of(args, recoding.source)
    calibration = [Path(file) for file in args.settings.get("calibration", ())]
    make_part(
        recoding.step,
        args,
        inputs,
        lambda: RecodedFolder(open_recoding(args.source, args.settings), inputs[recoding.source]),
        calibration,
    )


if __name__ == "__main__":
    run(main)

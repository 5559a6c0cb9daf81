"""Makes the parts of a recoded checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

import json

from posttrain.artifacts.recodings import recoding_of
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import JOIN, SOURCE, join_parts, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import command_line, run


def main() -> None:
    """Join the parts: index, config, tokenizer, receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **JOIN,
        settings=(json.loads, "format and its settings, as JSON"),
    )
    recoding = recoding_of(args.settings["format"])
    inputs = source_of(args, recoding.source)
    making = RecodedFolder(open_recoding(args.source, args.settings), inputs[recoding.source])
    join_parts(recoding.finalize_step, recoding.step, args, inputs, making)


if __name__ == "__main__":
    run(main)

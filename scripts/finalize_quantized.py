"""Makes the parts of a recoded checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

import json

from posttrain.artifacts.recodings import recoding_of
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.parts.steps import join_parser, join_parts, source_of
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain.cli import run


def main() -> None:
    """Join the parts: index, config, tokenizer, receipt."""
    parser = join_parser(__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="format and its settings, as JSON")
    args = parser.parse_args()
    recoding = recoding_of(args.settings["format"])
    inputs = source_of(args, recoding.source)
    making = RecodedFolder(open_recoding(args.source, args.settings), inputs[recoding.source])
    join_parts(recoding.finalize_step, recoding.step, args, inputs, making)


if __name__ == "__main__":
    run(main)

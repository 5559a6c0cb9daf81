"""Writes one part of a quantised checkpoint for serving from a BF16 checkpoint in Hub layout."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.checkpoint.parts.recoding_steps import part_parser, recode_part
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.cli import run

STEP = "quantize_serving"


def main() -> None:
    """Quantise this part's share of the shards; a newer calibration makes it again."""
    parser = part_parser(__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="format and its settings, as JSON")
    args = parser.parse_args()
    calibration = [Path(file) for file in args.settings.get("calibration", ())]
    recode_part(STEP, "hf_patched", args, lambda: Quantization(args.source, args.settings), calibration)


if __name__ == "__main__":
    run(main)

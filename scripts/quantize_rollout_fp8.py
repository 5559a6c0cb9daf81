"""Writes one part of the engines' FP8 checkpoint from a BF16 checkpoint in Hub layout."""

from __future__ import annotations

import json

from posttrain.checkpoint.parts.recoding_steps import part_parser, recode_part
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.cli import run

STEP = "quantize_rollout_fp8"


def main() -> None:
    """Quantise this part's share of the shards."""
    parser = part_parser(__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="format and its settings, as JSON")
    args = parser.parse_args()
    recode_part(STEP, "hf_patched", args, lambda: Quantization(args.source, args.settings))


if __name__ == "__main__":
    run(main)

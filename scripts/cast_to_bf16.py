"""Writes one part of a BF16 checkpoint from a quantised one."""

from __future__ import annotations

from posttrain.checkpoint.parts.recoding_steps import part_parser, recode_part
from posttrain.checkpoint.quantization.dequantize import CastToBf16
from posttrain.cli import run

STEP = "cast_to_bf16"


def main() -> None:
    """Cast this part's share of the shards."""
    args = part_parser(__doc__).parse_args()
    recode_part(STEP, "hf", args, lambda: CastToBf16(args.source))


if __name__ == "__main__":
    run(main)

"""Makes the parts of a BF16 checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

from posttrain.checkpoint.parts.recoding_steps import join_parser, join_recoded
from posttrain.checkpoint.quantization.dequantize import CastToBf16
from posttrain.cli import run

STEP = "finalize_bf16"
PART_STEP = "cast_to_bf16"


def main() -> None:
    """Join the parts: index, config, tokenizer, receipt."""
    args = join_parser(__doc__).parse_args()
    join_recoded(STEP, PART_STEP, "hf", args, lambda: CastToBf16(args.source))


if __name__ == "__main__":
    run(main)

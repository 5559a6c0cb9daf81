"""Makes the parts of a quantised checkpoint for serving one checkpoint, and gives the folder its name."""

from __future__ import annotations

import json

from posttrain.checkpoint.parts.recoding_steps import join_parser, join_recoded
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.cli import run

STEP = "finalize_serving"
PART_STEP = "quantize_serving"


def main() -> None:
    """Join the parts: index, config, tokenizer, receipt."""
    parser = join_parser(__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="format and its settings, as JSON")
    args = parser.parse_args()
    join_recoded(STEP, PART_STEP, "hf_patched", args, lambda: Quantization(args.source, args.settings))


if __name__ == "__main__":
    run(main)

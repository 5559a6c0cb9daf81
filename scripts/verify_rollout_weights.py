"""Measures what quantising did to the weights, on the files themselves, and writes it as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import require_files, write_json
from posttrain.artifacts.sharing import shared
from posttrain.checkpoint.quantization.quantization_report import verify_weights
from posttrain.cli import run


def main() -> None:
    """Check both folders against their receipts, compare all weights, write the report."""
    args = parse_arguments()
    import torch

    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    quantized = require_files(args.folder, args.receipt)
    report = verify_weights(args.source, args.folder, args.threads)
    with shared(args.report):
        write_json(args.report, {"inputs": {"source": source.digest, "quantized": quantized.digest}, "classes": report})


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="BF16 checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--folder", type=Path, required=True, help="what was made of it")
    parser.add_argument("--receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--report", type=Path, required=True, help="errors, saturation and size by class of tensors")
    parser.add_argument("--threads", type=int, default=1, help="tensors compared at a time")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

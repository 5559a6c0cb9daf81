"""Measures the quantisation error of the weights from the files, and writes it as JSON."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.quantization.quantization_report import verify_weights
from posttrain.cli import command_line, run
from posttrain.store import require_files, write_json
from posttrain.store.group_permissions import shared


def main() -> None:
    """Check both folders against their receipts, compare all weights, write the report."""
    args = command_line(
        __doc__,
        source=(Path, "BF16 checkpoint in Hub layout"),
        source_receipt=(Path, "its receipt"),
        folder=(Path, "what was made of it"),
        receipt=(Path, "its receipt"),
        report=(Path, "errors, saturation and size by class of tensors"),
        threads={"type": int, "default": 1, "help": "tensors compared at a time"},
    )
    import torch

    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    quantized = require_files(args.folder, args.receipt)
    report = verify_weights(args.source, args.folder, args.threads)
    with shared(args.report):
        write_json(args.report, {"inputs": {"source": source.digest, "quantized": quantized.digest}, "classes": report})


if __name__ == "__main__":
    run(main)

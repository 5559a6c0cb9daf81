"""Take a Megatron torch_dist checkpoint that is there already, after proving it equal to the source bit by bit."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.formats.adopted_torch_dist import check_adoptable, place_torch_dist
from posttrain.checkpoint.formats.torch_dist import verify_torch_dist
from posttrain.checkpoint.parts.steps import read_architecture
from posttrain.cli import command_line, run

STEP = "adopt_torch_dist"


def main() -> None:
    """Check names and shapes, link or copy the files, compare every tensor with the source, write the receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        source=(Path, "checkpoint in Hub layout"),
        source_receipt=(Path, "its receipt"),
        adopted=(Path, "the torch_dist folder; never written to"),
        folder=(Path, "final name of the folder in the store"),
        architecture=(read_architecture, "dimensions, as JSON"),
        threads={"type": int, "default": 1, "help": "files and tensors handled at a time"},
        receipt=(Path, "receipt of the folder, written last"),
    )
    import torch

    torch.set_num_threads(1)
    inputs = {"hf_patched": require_files(args.source, args.source_receipt).digest}
    sources = [path for path in args.adopted.rglob("*") if path.is_file()]
    if not claim(args.receipt, Receipt(STEP, (), inputs, {}), args.folder, sources):
        return
    names = check_adoptable(args.adopted, args.architecture)
    with building(args.folder) as partial:
        files = place_torch_dist(args.adopted, partial, names, args.threads)
        verify_torch_dist(args.source, partial, args.architecture, args.threads)
    write_receipt(args.receipt, Receipt(STEP, files, inputs, {}), started)


if __name__ == "__main__":
    run(main)

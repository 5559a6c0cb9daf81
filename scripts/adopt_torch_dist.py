"""Take a Megatron torch_dist checkpoint that is there already, after proving it equal to the source bit by bit."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.formats.adopted_torch_dist import check_adoptable, place_torch_dist
from posttrain.checkpoint.formats.torch_dist import verify_torch_dist
from posttrain.checkpoint.parts.steps import read_architecture
from posttrain.cli import run

STEP = "adopt_torch_dist"


def main() -> None:
    """Check names and shapes, link or copy the files, compare every tensor with the source, write the receipt."""
    args, started = parse_arguments(), time.time()
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


def parse_arguments() -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--adopted", type=Path, required=True, help="the torch_dist folder; never written to")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the folder in the store")
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="files and tensors handled at a time")
    parser.add_argument("--receipt", type=Path, required=True, help="receipt of the folder, written last")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

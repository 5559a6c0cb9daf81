"""Check a checkpoint against the configured architecture and make the copy that everything later reads.

The copy's weights are links; `config.json` and `tokenizer_config.json` change where the target asks for it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.formats.hf_config import CONFIG, check_config, patch_folder
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.parts.steps import read_architecture
from posttrain.cli import run
from posttrain.errors import raise_if_any


def main() -> None:
    """Compare, patch, write the receipt."""
    args, started = parse_arguments(), time.time()
    source_receipt = require_files(args.source, args.source_receipt)
    tensors = check_layout(args.source).infos
    raise_if_any(check_config(read_object(args.source / CONFIG), args.architecture, tensors, args.trust_remote_code))
    inputs = {"hf": source_receipt.digest}
    if not claim(args.receipt, Receipt("patch_hf_config", (), inputs, {"target": args.target}), args.destination):
        return
    with building(args.destination) as partial:
        files = patch_folder(args.source, partial, args.target, source_receipt)
        check_layout(partial)
    write_receipt(args.receipt, Receipt("patch_hf_config", files, inputs, {"target": args.target}), started)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, type=Path, help="checkpoint in Hub layout")
    parser.add_argument("--source-receipt", required=True, type=Path)
    parser.add_argument("--destination", required=True, type=Path, help="where the patched copy goes")
    parser.add_argument("--receipt", required=True, type=Path)
    parser.add_argument("--architecture", required=True, type=read_architecture, help="model.architecture as JSON")
    parser.add_argument("--target", required=True, choices=("native", "deepseek_v32"))
    parser.add_argument("--trust-remote-code", action="store_true", help="accept a checkpoint with `auto_map`")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

"""Check a checkpoint against the configured architecture and make the copy that everything later reads.

The copy's weights are links; `config.json` and `tokenizer_config.json` change where the target asks for it.
"""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.formats.hf_config import CONFIG, check_config, patch_folder
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.parts.steps import read_architecture
from posttrain.cli import command_line, run
from posttrain.errors import raise_if_any


def main() -> None:
    """Compare, patch, write the receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        source=(Path, "checkpoint in Hub layout"),
        source_receipt=Path,
        destination=(Path, "where the patched copy goes"),
        receipt=Path,
        architecture=(read_architecture, "model.architecture as JSON"),
        target={"required": True, "choices": ("native", "deepseek_v32")},
        trust_remote_code={"action": "store_true", "help": "accept a checkpoint with `auto_map`"},
    )
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


if __name__ == "__main__":
    run(main)

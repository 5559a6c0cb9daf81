"""Joins the parts of an exported model to a checkpoint in Hub layout, and renames its folder."""

from __future__ import annotations

from posttrain.checkpoint.export import FINALIZE_STEP, STEP, HubExport
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.parts.steps import JOIN, SOURCE, join_parts, source_of
from posttrain.cli import command_line, run
from posttrain.store import read_receipt


def main() -> None:
    """Check the parts, add index, config and tokenizer, rename the folder, write the receipt."""
    args = command_line(__doc__, **SOURCE, **JOIN)
    inputs = {**read_receipt(args.part_receipts[0]).inputs, **source_of(args, "hf_patched")}
    join_parts(FINALIZE_STEP, STEP, args, inputs, HubExport(CheckpointReader(args.source), inputs))


if __name__ == "__main__":
    run(main)

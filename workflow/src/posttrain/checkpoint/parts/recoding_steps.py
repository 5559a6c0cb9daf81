"""The two steps of every recoding: parts that write shards, and the last one that makes them a checkpoint.

What differs from rule to rule (`quantize_rollout_fp8`, `quantize_serving`, `cast_to_bf16`) stands in its script: its
name, what its source is called in receipts, and how the recoding is made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from posttrain.artifacts import Receipt, building, claim, require_files, write_receipt
from posttrain.checkpoint.parts.parts import read_parts, write_part_receipt
from posttrain.checkpoint.parts.recoded_folder import Recoding, finalize_folder, write_part


def recode_part(
    step: str,
    source_name: str,
    args: argparse.Namespace,
    open_recoding: Callable[[], Recoding],
    files: Sequence[Path] = (),
) -> None:
    """Check the source, write a part's share of the shards, and say so in the part's receipt.

    Args:
        step: Name of the rule.
        source_name: What receipts call the source: "hf_patched" or "hf".
        args: Of `part_parser`.
        open_recoding: Opens source and format; called when there is work to do.
        files: What else the part is made from; a newer one makes it again.

    Raises:
        CheckpointError: When the source is not what its receipt says, or a tensor cannot be recoded.
    """
    started = time.time()
    torch.set_num_threads(1)
    source = require_files(args.source, args.source_receipt)
    inputs, settings = {source_name: source.digest}, {"part": args.part, "num_parts": args.num_parts}
    if not claim(args.receipt, Receipt(step, (), inputs, settings), args.folder, files):
        return
    made = write_part(open_recoding(), source.digest, args.folder, args.part, args.num_parts, args.threads)
    write_part_receipt(args.receipt, step, args.part, args.num_parts, made, inputs, started)


def join_recoded(
    step: str, part_step: str, source_name: str, args: argparse.Namespace, open_recoding: Callable[[], Recoding]
) -> None:
    """Check the parts, write index and config, copy the tokenizer, give the folder its name, write the receipt.

    Args:
        step: Name of the rule.
        part_step: Of the rule that made the parts.
        source_name: See `recode_part`.
        args: Of `join_parser`.
        open_recoding: Opens source and format.

    Raises:
        CheckpointError: When a part is missing or made from something else.
    """
    started = time.time()
    inputs = {source_name: require_files(args.source, args.source_receipt).digest}
    parts = read_parts(args.folder, args.part_receipts, part_step, inputs)
    recoding = open_recoding()
    settings = dict(recoding.settings)
    wanted = Receipt(step, tuple(part.record for part in parts.values()), inputs, settings)
    if not claim(args.receipt, wanted, args.folder, parts=args.part_receipts):
        return
    with building(args.folder) as partial:
        records = finalize_folder(recoding, partial, parts)
    write_receipt(args.receipt, Receipt(step, records, inputs, settings), started)


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a part; a rule adds what is its own."""
    parser = _parser(description)
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--num-parts", type=int, required=True, help="number of parts")
    parser.add_argument("--threads", type=int, default=1, help="shards written at a time")
    return parser


def join_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a last step; a rule adds what is its own."""
    parser = _parser(description)
    parser.add_argument("--part-receipts", type=Path, nargs="+", required=True, help="receipts of all parts")
    return parser


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint in Hub layout")
    parser.add_argument("--source-receipt", type=Path, required=True, help="its receipt")
    parser.add_argument("--folder", type=Path, required=True, help="final name of the folder")
    parser.add_argument("--receipt", type=Path, required=True, help="written last")
    return parser

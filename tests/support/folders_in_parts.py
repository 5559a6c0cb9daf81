"""Folders that are made in parts, from beginning to end, as the two rules make them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from posttrain.checkpoint.parts.steps import Making, join_parts, make_part
from posttrain.store import Receipt, part_receipt_of, read_receipt, receipt_of

INPUTS = {"hf_patched": "5" * 64}


def make_folder(
    making: Making,
    folder: Path,
    num_parts: int = 1,
    num_threads: int = 1,
    steps: tuple[str, str] = ("quantize_rollout_fp8", "finalize_rollout_fp8"),
    inputs: Mapping[str, str] = INPUTS,
) -> Receipt:
    """Make a folder and return its receipt."""
    receipts = [part_receipt_of(folder, part) for part in range(num_parts)]
    for part, receipt in enumerate(receipts):
        args = argparse.Namespace(folder=folder, receipt=receipt, part=part, num_parts=num_parts, threads=num_threads)
        make_part(steps[0], args, inputs, lambda: making)
    args = argparse.Namespace(folder=folder, receipt=receipt_of(folder), part_receipts=receipts)
    join_parts(steps[1], steps[0], args, inputs, making)
    return read_receipt(receipt_of(folder))

"""Verify the origin of every byte of the checkpoints that a run starts from, before the run exists."""

from __future__ import annotations

from posttrain.checkpoint.verification import prove
from posttrain.store import Paths


def main(paths: Paths, sizes_only: bool) -> None:
    """Check everything, show the results, and fail with the names of all mismatches."""
    prove(paths, content=not sizes_only, whole_run=False)

"""Prove where every byte of the checkpoints that a run begins with came from, before there is a run."""

from __future__ import annotations

from posttrain.checkpoint.verification import prove
from posttrain.store import Paths


def main(paths: Paths, sizes_only: bool) -> None:
    """Check everything, show it, and fail by naming whatever is not what it should be."""
    prove(paths, content=not sizes_only, whole_run=False)

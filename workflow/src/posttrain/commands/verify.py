"""Prove where every byte of a run came from: follow the receipts' digests to the source, hash every file again."""

from __future__ import annotations

from posttrain.checkpoint.verification import prove
from posttrain.store import Paths, write_json


def main(paths: Paths, sizes_only: bool) -> None:
    """Check everything, show it, and fail by naming whatever is not what it should be."""
    if sizes_only:
        prove(paths, content=False)
        return
    # What was proven once may not hold any more.
    paths.verified.unlink(missing_ok=True)
    write_json(paths.verified, prove(paths))

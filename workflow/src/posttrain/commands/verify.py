"""Verify the origin of every byte of a run: follow the receipts' digests to the source, and hash every file again."""

from __future__ import annotations

from posttrain.checkpoint.verification import prove
from posttrain.store import Paths, write_json


def main(paths: Paths, sizes_only: bool) -> None:
    """Check everything, show the results, and fail with the names of all mismatches."""
    if sizes_only:
        prove(paths, content=False)
        return
    # An earlier proof may no longer hold.
    paths.verified.unlink(missing_ok=True)
    write_json(paths.verified, prove(paths))

"""Builds a folder under a temporary name and renames it when it is complete."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from posttrain.store import build_lock
from posttrain.store.durable import sync_folder, sync_tree
from posttrain.store.paths import partial_of, receipt_of

log = logging.getLogger(__name__)


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Build `folder` under its `.partial` name; it gets its own name when the block ends without an error.

    Files of an earlier attempt are kept, so that the step can check and reuse them. A finished folder without a receipt
    (its step must run again) becomes the partial one. One attempt never leaves both; if two writers did, the finished
    folder is kept.

    Raises:
        RuntimeError: Another process finished the folder meanwhile; its folder stays.
    """
    partial = partial_of(folder)
    if folder.exists():
        if partial.exists():
            log.warning("removing %s: %s is complete, and only a second writer can have left both", partial, folder)
            shutil.rmtree(partial)
        folder.rename(partial)
    partial.mkdir(parents=True, exist_ok=True)
    yield partial
    sync_tree(partial)
    build_lock.confirm(receipt_of(folder))
    try:
        partial.rename(folder)
    except OSError as error:
        raise RuntimeError(
            f"{folder}: another process finished it while this one did; run again to check it"
        ) from error
    sync_folder(folder.parent)

"""One process at a time makes an artefact, even if several users and nodes share the store.

A process holds an artefact from `hold` until it has written the receipt or has ended. A second process waits, prints
which one it waits for, and then finds the work done. The lock is a lease in the folder `{artefact}.lease` beside the
receipt.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from posttrain.store.group_permissions import share_what_follows
from posttrain.store.lease import Lease, LeaseHeldError, check_epoch, read_holder

log = logging.getLogger(__name__)

# Making an artefact takes seconds to hours; whoever waits is told at once, and now and then.
POLL_SECONDS = 0.5
REMIND_SECONDS = 60.0
# What this process holds, by the receipt that ends it.
_held: dict[Path, list[Lease]] = {}


def lock_folder_of(receipt: Path) -> Path:
    """Return the folder of an artefact's lock: `hf.receipt.json` -> `hf.lease`."""
    return receipt.with_name(receipt.name.removesuffix(".receipt.json") + ".lease")


def hold(receipt: Path, parts: Iterable[Path] = ()) -> None:
    """Make this process the only one that makes an artefact; waits while another does.

    Args:
        receipt: The artefact's receipt.
        parts: Receipts of parts that must not be made anew meanwhile.
    """
    if receipt in _held:
        return
    share_what_follows(receipt)
    _held[receipt] = []
    try:
        for path in (receipt, *parts):
            _held[receipt].append(_wait_for(path))
    except BaseException:
        release(receipt)
        raise


def confirm(receipt: Path) -> None:
    """Make sure that nobody has taken over what this process holds; call it before others can see its work.

    Raises:
        LeaseLostError: When another process believed this one dead, and makes the artefact itself.
    """
    for lease in _held.get(receipt, ()):
        check_epoch(lease.folder, lease.epoch)


def release(receipt: Path) -> None:
    """Let others have the artefact; nothing happens when it is not held."""
    for lease in _held.pop(receipt, ()):
        lease.__exit__(None, None, None)


def _wait_for(receipt: Path) -> Lease:
    lease, reminded = Lease(receipt, lock_folder_of(receipt)), 0.0
    while True:
        try:
            return lease.__enter__()
        except LeaseHeldError:
            if time.monotonic() - reminded > REMIND_SECONDS or not reminded:
                name = receipt.name.removesuffix(".receipt.json")
                log.info("waiting: %s is being made by %s", receipt.with_name(name), read_holder(lease.folder))
                reminded = time.monotonic()
            time.sleep(POLL_SECONDS)


@atexit.register
def _release_all() -> None:
    for receipt in list(_held):
        # A child of a fork ends without giving away what its parent holds; a store that is gone needs no release.
        if all(os.getpid() == holder.pid for lease in _held[receipt] if (holder := read_holder(lease.folder))):
            with contextlib.suppress(OSError):
                release(receipt)

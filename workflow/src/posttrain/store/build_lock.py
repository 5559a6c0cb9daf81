"""One process at a time makes an artefact, even if several users and nodes share the store.

A process holds an artefact from `hold` until it has written the receipt or has ended. A second process waits, prints
the holder, and then finds the work done. The lock is a lease in the folder `{artefact}.lease`, next to the receipt.
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

# Making an artefact takes seconds to hours; a waiting process prints a message at once and at this interval.
POLL_SECONDS = 0.5
REMIND_SECONDS = 60.0
# Receipt -> the lock that this process holds until the receipt is written.
_held: dict[Path, list[Lease]] = {}


def lock_folder_of(receipt: Path) -> Path:
    """Return the folder of an artefact's lock: `hf.receipt.json` -> `hf.lease`."""
    return receipt.with_name(receipt.name.removesuffix(".receipt.json") + ".lease")


def hold(receipt: Path, parts: Iterable[Path] = ()) -> None:
    """Lock an artefact for this process; waits while another process makes it.

    Args:
        receipt: The artefact's receipt.
        parts: Receipts of parts that must not be remade meanwhile.
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
    """Check that no other process has taken over the lock; call this before publishing the artefact.

    Raises:
        LeaseLostError: Another process took over, because it considered this one dead.
    """
    for lease in _held.get(receipt, ()):
        check_epoch(lease.folder, lease.epoch)


def release(receipt: Path) -> None:
    """Release the artefact, if it is held."""
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
        # A forked child must not release its parent's locks; a deleted store needs no release.
        if all(os.getpid() == holder.pid for lease in _held[receipt] if (holder := read_holder(lease.folder))):
            with contextlib.suppress(OSError):
                release(receipt)

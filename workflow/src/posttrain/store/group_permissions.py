"""A store that a group shares: every file and folder in it belongs to the group, and its members may write.

The umask's group bits are cleared only for files in the store: results, logs and Snakemake's own files keep the user's
umask. The driver creates the store's folders before Snakemake does.
"""

from __future__ import annotations

import contextlib
import grp
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from posttrain.errors import ConfigError, Problem

# Path of the shared store, for the steps that a driver starts.
STORE_VARIABLE = "POSTTRAIN_SHARED_STORE"
# Bits of a umask for the group and for others.
GROUP_BITS = 0o070
OTHERS_BITS = 0o007
# Subfolders inherit the group and this bit.
SHARED_MODE = 0o2775


def announce_sharing(store: Path, group: str) -> None:
    """Announce to the steps of this process whether a group shares the store.

    Raises:
        ConfigError: The group does not exist, or this user is not a member.
    """
    os.environ.pop(STORE_VARIABLE, None)
    if not group:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        number = -1
    if number not in (os.getgid(), *os.getgroups()):
        mine = ", ".join(sorted(_name(gid) for gid in {os.getgid(), *os.getgroups()}))
        raise ConfigError(
            [
                Problem(
                    "not-your-group", "site.store_group", group, f"a group of yours: {mine}", "ask who runs the cluster"
                )
            ]
        )
    os.environ[STORE_VARIABLE] = os.path.abspath(store)


def share_store(store: Path, group: str, outputs: Iterable[str | Path] = ()) -> None:
    """Give a store's root and the folders of future outputs to the group, if there is one.

    Args:
        store: Root of the store.
        group: Name of the group, or "".
        outputs: Files that steps will make, in the store or elsewhere.
    """
    if not group:
        return
    parents = {parent for output in outputs for parent in Path(output).parents if parent.is_relative_to(store)}
    for folder in sorted({store, *parents}):
        folder.mkdir(parents=True, exist_ok=True)
        # The first user owns the root.
        if folder.stat().st_uid == os.getuid():
            os.chown(folder, -1, grp.getgrnam(group).gr_gid)
            folder.chmod(SHARED_MODE & ~(_umask() & OTHERS_BITS))


def share_what_follows(path: Path) -> None:
    """Give the group write access to all files created from now on, if `path` is in a shared store."""
    store = os.environ.get(STORE_VARIABLE)
    if store and Path(os.path.abspath(path)).is_relative_to(store):
        os.umask(_umask() & ~GROUP_BITS)


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """Give the group write access to files created in the block, if `path` is in a shared store."""
    before = _umask()
    share_what_follows(path)
    try:
        yield
    finally:
        os.umask(before)


def _umask() -> int:
    """Return the umask, which can only be read by setting it; the temporary value is the strictest."""
    found = os.umask(0o777)
    os.umask(found)
    return found


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

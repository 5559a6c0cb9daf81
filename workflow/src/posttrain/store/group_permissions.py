"""A store that a group shares: every file and folder in it belongs to the group, and its members may write.

The group's bits of the umask are given up for what is written to the store alone: results, logs and Snakemake's own
files are as open as the user's umask says. The driver makes the store's folders before Snakemake does.
"""

from __future__ import annotations

import contextlib
import grp
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from posttrain.errors import ConfigError, Problem

# Tells the steps that a driver starts where the shared store lies.
STORE_VARIABLE = "POSTTRAIN_SHARED_STORE"
# What a umask takes from the group and from all others.
GROUP_BITS = 0o070
OTHERS_BITS = 0o007
# Folders made inside inherit the group and this bit.
SHARED_MODE = 0o2775


def announce_sharing(store: Path, group: str) -> None:
    """Let the steps of this process know that a group shares the store; that none does, without a group.

    Raises:
        ConfigError: When there is no such group, or we are not in it.
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
        raise ConfigError([Problem("site.store_group", group, f"a group of yours: {mine}", "ask who runs the cluster")])
    os.environ[STORE_VARIABLE] = os.path.abspath(store)


def share_store(store: Path, group: str, outputs: Iterable[str | Path] = ()) -> None:
    """Make a store's root, and the folders of what will be made in it, belong to the group. Nothing without a group.

    Args:
        store: The root.
        group: Its name.
        outputs: Files that steps are about to make, in the store or elsewhere.
    """
    if not group:
        return
    parents = {parent for output in outputs for parent in Path(output).parents if parent.is_relative_to(store)}
    for folder in sorted({store, *parents}):
        folder.mkdir(parents=True, exist_ok=True)
        # The first to come owns it.
        if folder.stat().st_uid == os.getuid():
            os.chown(folder, -1, grp.getgrnam(group).gr_gid)
            folder.chmod(SHARED_MODE & ~(_umask() & OTHERS_BITS))


def share_what_follows(path: Path) -> None:
    """Let the group change whatever this process makes from now on, if `path` lies in a shared store."""
    store = os.environ.get(STORE_VARIABLE)
    if store and Path(os.path.abspath(path)).is_relative_to(store):
        os.umask(_umask() & ~GROUP_BITS)


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """Let the group change what is made in the block, if `path` lies in a shared store."""
    before = _umask()
    share_what_follows(path)
    try:
        yield
    finally:
        os.umask(before)


def _umask() -> int:
    """Return the umask, which can only be read by setting it; meanwhile nothing is open to anybody."""
    found = os.umask(0o777)
    os.umask(found)
    return found


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

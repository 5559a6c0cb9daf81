"""A store that a group shares: every file and folder belongs to the group, and its members may write."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from posttrain.errors import ConfigError, Problem

# Group-writable for all that a process and its children make.
GROUP_UMASK = 0o002
# Folders made inside inherit the group and this bit.
SHARED_MODE = 0o2775


def share_umask(group: str) -> None:
    """Let this process and its children write files that the group may change; nothing without a group.

    Raises:
        ConfigError: When there is no such group, or we are not in it.
    """
    if not group:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        number = -1
    if number not in (os.getgid(), *os.getgroups()):
        mine = ", ".join(sorted(_name(gid) for gid in {os.getgid(), *os.getgroups()}))
        raise ConfigError([Problem("site.store_group", group, f"a group of yours: {mine}", "ask who runs the cluster")])
    os.umask(GROUP_UMASK)


def share_store(store: Path, group: str) -> None:
    """Make a store's root belong to the group; what is made in it follows. Nothing without a group."""
    if not group:
        return
    store.mkdir(parents=True, exist_ok=True)
    # The first to come owns it.
    if store.stat().st_uid == os.getuid():
        os.chown(store, -1, grp.getgrnam(group).gr_gid)
        store.chmod(SHARED_MODE)


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

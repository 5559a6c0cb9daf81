"""Limits of memory and processes by the kernel, where a cgroup (version 2) is delegated to this user.

Where none is, `posttrain.sandbox.watch` alone enforces them, a few milliseconds late.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from posttrain.sandbox.program import Limits

ROOT = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
CONTROLLERS = {"memory", "pids"}
_PREFIX = "posttrain-sandbox"
_numbers = itertools.count()


@lru_cache
def find_delegated(root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return the nearest cgroup above this process in which it may make limited ones; None if there is none.

    Args:
        root: Where cgroups are mounted.
        membership: The file that names this process's cgroups.
    """
    lines = [line.split(":", 2) for line in membership.read_text(encoding="utf-8").splitlines()]
    own = [path for number, _, path in lines if number == "0"]
    if not own or not (root / "cgroup.controllers").exists():
        return None
    place = root / own[0].lstrip("/")
    for folder in (place, *place.parents):
        if _is_delegated(folder):
            _remove_abandoned(folder)
            return folder
        if folder == root:
            break
    return None


def limits_by() -> str:
    """Return what enforces the limits of memory and processes on this machine."""
    return "cgroup v2" if find_delegated() else "rlimits and a watcher"


def _is_delegated(folder: Path) -> bool:
    try:
        enabled = set((folder / "cgroup.subtree_control").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return enabled >= CONTROLLERS and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


@contextlib.contextmanager
def limited_cgroup(parent: Path, limits: Limits) -> Iterator[Path]:
    """Make a cgroup with the limits of a sandbox; remove it once its processes have ended.

    Args:
        parent: What `find_delegated` has found.
        limits: The sandbox's limits.
    """
    folder = parent / f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        # bubblewrap's first process counts, too.
        values = {"memory.max": limits.memory_bytes, "memory.oom.group": 1, "pids.max": limits.processes + 1}
        for name, value in values.items():
            (folder / name).write_text(str(value), encoding="utf-8")
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0", encoding="utf-8")
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def add_process(folder: Path, pid: int) -> None:
    """Move a process into a cgroup; those that it starts afterwards follow."""
    (folder / "cgroup.procs").write_text(str(pid), encoding="utf-8")


def has_run_out_of_memory(folder: Path) -> bool:
    """Return whether the kernel ended processes of a cgroup because they exceeded its memory."""
    words = (folder / "memory.events").read_text(encoding="utf-8").split()
    return int(dict(zip(words[::2], words[1::2], strict=True)).get("oom_kill", 0)) > 0


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed on this machine because memory ran out; 0 if it does not say."""
    with contextlib.suppress(OSError):
        rows = map(str.split, VMSTAT.read_text(encoding="utf-8").splitlines())
        return int(dict(rows).get("oom_kill", 0))
    return 0


def _remove_abandoned(parent: Path) -> None:
    """Remove empty cgroups of processes that were killed before they could do so."""
    for folder in parent.glob(f"{_PREFIX}-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()

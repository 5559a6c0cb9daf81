"""Measures all processes of a sandbox from outside: rlimits hold for one process each."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.sandbox.bubblewrap import WRITABLE
from posttrain.sandbox.program import Ended, Limits

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Watcher:
    """Watches a sandbox.

    Args:
        init: Process ID of the sandbox's first process. All others descend from it, detached ones, too.
        limits: Its limits.
    """

    init: int
    limits: Limits

    def exceeded(self) -> Ended | None:
        """Return the limit that the sandbox exceeds now, if any."""
        processes = list(_descendants(self.init))
        if sum(map(_num_threads, processes)) > self.limits.processes:
            return "processes"
        stored, num_files = self._stored()
        if num_files > self.limits.files:
            return "files"
        most = self.limits.memory_bytes
        # Pages that several processes share count in each resident set, but once in the sum of proportional sets, which
        # are slower to read.
        if stored + sum(map(_resident, processes)) > most and stored + sum(map(_proportional, processes)) > most:
            return "memory"
        return None

    def _stored(self) -> tuple[int, int]:
        """Return the bytes and the files in writable folders."""
        size = number = 0
        for folder in WRITABLE:
            try:
                found = os.statvfs(f"/proc/{self.init}/root{folder}")
            except OSError:  # it has ended
                continue
            size += (found.f_blocks - found.f_bfree) * found.f_frsize
            number += found.f_files - found.f_ffree
        return size, number


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one."""
    waiting = [pid]
    while waiting:
        children = children_of(waiting.pop())
        yield from children
        waiting += children


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    for task in _tasks(pid):
        found += [int(word) for word in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _num_threads(pid: int) -> int:
    return len(_tasks(pid))


def _resident(pid: int) -> int:
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE_BYTES if words else 0


def _proportional(pid: int) -> int:
    """Return the proportional set size, which divides shared pages among those that share them."""
    rows = (line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines())
    sizes = [int(row[1]) << 10 for row in rows if row[:1] == ["Pss:"]]
    return sizes[0] if sizes else _resident(pid)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended
        return ""

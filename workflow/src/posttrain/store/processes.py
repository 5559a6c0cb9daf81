"""Identifies processes across time: a process id alone does not, because ids are reused."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_ids() -> str:
    """Return a name for the set of process ids that we see: containers on one host may each have their own."""
    return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def started_ticks(pid: int) -> int | None:
    """Return when a process started, None when it does not run. Ticks, unlike seconds, do not move with the clock."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything; behind it, state is the 1st word and the start time the 20th.
    words = status.rpartition(")")[2].split()
    return None if words[0] in "ZX" else int(words[19])


def user_name() -> str:
    """Return this user's name, or the number where the machine has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

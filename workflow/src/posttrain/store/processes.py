"""Identifies processes across time, for which a process id is not enough because ids are reused."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_ids() -> str:
    """Return the name of this process's pid namespace and boot: containers on one host may have their own ids."""
    return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process, or None if it does not run. Ticks, unlike seconds, ignore clock changes."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything; after it, the state is word 1 and the start time word 20.
    words = status.rpartition(")")[2].split()
    return None if words[0] in "ZX" else int(words[19])


def user_name() -> str:
    """Return this user's name, or the id if the machine has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

"""Landlock (Linux 5.13): a layer of the kernel below the sandbox's mounts, where it is there.

It allows a program's processes to read and run what the sandbox shows, and to write in its own folders, even if a
mount allows more: nothing in /proc can be written, for example. From ABI 6 on, they also reach no abstract Unix sockets
and no processes outside of the sandbox. The first code inside (`posttrain.sandbox.inside`) applies it, after
bubblewrap's mounts.

Source: https://docs.kernel.org/userspace-api/landlock.html and linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache

from posttrain.sandbox.bubblewrap import WRITABLE
from posttrain.sandbox.python_root import PythonRoot

# The same on all architectures.
_CREATE_RULESET, _VERSION_FLAG = 444, 1
# Without the right to rename between folders, which ABI 2 has, programs would fail.
OLDEST_ABI = 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_DEVICES = 1 << 6 | 1 << 11
# The first right that an ABI does not have, by ABI: truncating comes with 3, ioctl of devices with 5.
_NEXT_RIGHT = {2: 14, 3: 15, 4: 15}
_NEWEST_RIGHT = 16
# Abstract Unix sockets and signals.
_SCOPES = 1 | 1 << 1
_REASONS = {
    errno.ENOSYS: "this kernel has none",
    errno.EOPNOTSUPP: "it is turned off in this kernel",
    errno.EPERM: "this container forbids it",
}


def query_abi() -> tuple[int, str]:
    """Return the kernel's ABI of Landlock, and if there is none that can be used (0), the reason."""
    system = ctypes.CDLL(None, use_errno=True)
    abi = int(system.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))
    if abi < 0:
        code = ctypes.get_errno()
        return 0, _REASONS.get(code, os.strerror(code))
    return (abi, "") if abi >= OLDEST_ABI else (0, f"ABI {abi} of this kernel is too old")


@lru_cache
def find_abi() -> int:
    """Return the ABI that sandboxes of this process use, 0 for none."""
    return query_abi()[0]


def describe_landlock() -> str:
    """Return whether programs are guarded by Landlock on this machine.

    Example:
        "Landlock ABI 7", "no Landlock (this kernel has none)".
    """
    abi, reason = query_abi()
    return f"Landlock ABI {abi}" if abi else f"no Landlock ({reason})"


def landlock_rules(root: PythonRoot, abi: int) -> str:
    """Return the rules in the form that `posttrain.sandbox.inside` reads; empty without Landlock.

    Args:
        root: What is visible of this machine.
        abi: The kernel's.

    Returns:
        A line with the fields of `struct landlock_ruleset_attr`, then a line for each path: its rights, its path.
    """
    if not abi:
        return ""
    handled = (1 << _NEXT_RIGHT.get(abi, _NEWEST_RIGHT)) - 1
    reads = _READ_FILE | _EXECUTE
    rules = {"/": _READ_DIR, "/proc": reads, "/dev": reads | _WRITE_FILE, **dict.fromkeys(root.paths, reads)}
    rules |= dict.fromkeys(WRITABLE, handled & ~_DEVICES)
    # Restricts no network: the sandbox's own has loopback alone, which is the program's.
    attributes = f"{handled} 0 {_SCOPES}" if abi >= 6 else f"{handled}"
    return "\n".join([attributes, *(f"{rights} {path}" for path, rights in rules.items())])

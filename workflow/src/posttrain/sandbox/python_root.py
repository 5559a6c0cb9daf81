"""What CPython needs of a file system: its interpreter, its standard library and the folders of shared libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from posttrain.sandbox.program import SandboxUnavailable

_LINKER_CACHE = Path("/etc/ld.so.cache")
_LDD_SECONDS = 60.0


@dataclass(frozen=True)
class PythonRoot:
    """The interpreter of a sandbox.

    Args:
        python: Path of the interpreter, outside and inside.
        paths: Files and folders that the sandbox sees read-only under their own paths, parents first.
        library_path: Where the linker has to look besides; empty unless this process names such folders, too.
    """

    python: str
    paths: tuple[str, ...]
    library_path: str = ""


@lru_cache
def find_python() -> PythonRoot:
    """Return this process's Python without its virtual environment.

    Raises:
        SandboxUnavailable: Its shared libraries cannot be listed.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    base |= {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    library = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    modules = [str(path) for folder in library for path in Path(folder, "lib-dynload").glob("*.so")]
    libraries = _shared_libraries([python, *modules])
    folders = {os.path.dirname(path) for path in libraries}
    cache = {str(_LINKER_CACHE)} if _LINKER_CACHE.exists() else set()
    library_path = ":".join(sorted(folders)) if os.environ.get("LD_LIBRARY_PATH") else ""
    return PythonRoot(python, _without_nested({python, *library, *folders, *cache}), library_path)


def _shared_libraries(files: Sequence[str]) -> set[str]:
    """Return the paths under which the dynamic linker finds the libraries of programs and modules."""
    try:
        # It exits with 1 if one of the files is static.
        done = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=_LDD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        told = f"the shared libraries of {files[0]} cannot be listed ({error}): install ldd"
        raise SandboxUnavailable(told) from error
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE))


def _without_nested(paths: set[str]) -> tuple[str, ...]:
    """Return the paths in order, without those below another one."""
    kept: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(f"{one}/") for one in kept):
            kept.append(path)
    return tuple(kept)

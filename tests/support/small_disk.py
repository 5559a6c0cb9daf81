"""Small file systems in memory: full ones, some without inodes, read-only ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import require


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Give an empty tmpfs below `folder`, gone with the block; skips the test where none can be mounted.

    Args:
        folder: Gets the mount point.
        options: Of mount: "size=1m", "nr_inodes=10".
    """
    require("crash", "" if os.getuid() == 0 else "a small disk needs root")
    disk = folder / "small-disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "posttrain-test", disk], check=True, timeout=60)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True, timeout=60)


def remount(disk: Path, options: str) -> None:
    """Change a mounted disk: "ro", "rw", "size=10m"."""
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True, timeout=60)

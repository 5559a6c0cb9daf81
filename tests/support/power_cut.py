"""A disk whose power can be cut: what was not synced is lost, for real.

The disk is an ext4 file system in a file, mounted through a loop device. What programs write stays in the memory of the
mounted file system until it is synced, so a copy of the file, taken at any moment, is what a power cut at that moment
leaves. `cut` takes that copy and mounts it in the place of the old one; ext4 replays its journal as after a real cut.

Mount options take away what would hide a missing fsync: no flush every few seconds (`commit`), no data before the
metadata that names it (`data=writeback`), no flush of a file that replaces another (`noauto_da_alloc`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import require

OPTIONS = "loop,noauto_da_alloc,data=writeback,commit=300"


@dataclass(frozen=True)
class Disk:
    """A mounted disk.

    Args:
        image: The file that is the disk.
        folder: Where it is mounted.
    """

    image: Path
    folder: Path

    def cut(self) -> None:
        """Lose what was not synced. Nobody may have a file of it open; whoever wrote has been killed."""
        left = self.image.with_suffix(".left")
        _call("cp", "--sparse=always", self.image, left)
        _call("umount", self.folder)
        left.replace(self.image)
        self.mount()

    def mount(self) -> None:
        """Mount what the image holds."""
        _call("mount", "-o", OPTIONS, self.image, self.folder)


@contextmanager
def new_disk(folder: Path, size_mib: int = 256) -> Iterator[Disk]:
    """Give an empty disk below `folder`, gone with the block; skips the test where none can be had.

    Args:
        folder: Holds image and mount point.
        size_mib: Of the disk; only what is written takes space.
    """
    _require_mounts()
    disk = Disk(folder / "disk.img", folder / "disk")
    disk.folder.mkdir()
    with open(disk.image, "wb") as file:
        file.truncate(size_mib << 20)
    _call("mkfs.ext4", "-q", "-F", disk.image)
    disk.mount()
    try:
        shutil.rmtree(disk.folder / "lost+found")
        yield disk
    finally:
        _call("umount", "--lazy", disk.folder)  # gone when the last one who still works there is


def _require_mounts() -> None:
    """Skip where loop devices or ext4 are not to be had; fail where REQUIRE asks for them."""
    is_there = os.getuid() == 0 and os.path.exists("/dev/loop-control") and shutil.which("mkfs.ext4")
    require("crash", "" if is_there else "a disk needs root, loop devices and mkfs.ext4")


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)

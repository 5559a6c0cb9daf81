"""Checks that folders are writable, and that the disks have enough space for the run's files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.plan.preflight.report import Finding, failed, ok
from posttrain.plan.sizing.storage import Storage, storage
from posttrain.readable import format_bytes
from posttrain.store import Paths, partial_of

# Reserve for logs, datasets, persisted rollouts and file headers, in addition to the tensors.
SPARE_BYTES = 1 << 30
# Some full file systems still create empty files. The size of a step's log and Snakemake's own records.
TRIED_BYTES = 1 << 16


@dataclass(frozen=True)
class Need:
    """Bytes that one configured root needs.

    Args:
        key: Config key of the root.
        folder: The root.
        missing_bytes: Bytes that remain to be written in it.
    """

    key: str
    folder: Path
    missing_bytes: int


def check_storage(paths: Paths) -> list[Finding]:
    """Check that every root is writable and that each disk has enough space."""
    needs = storage_needs(paths)
    findings = [check_writable(need.key, need.folder) for need in needs]
    return [*findings, *check_free_space(needs)]


def storage_needs(paths: Paths) -> list[Need]:
    """Return the bytes that remain to be written in each root, excluding those of earlier attempts."""
    site, needed = paths.resolved.config.site, storage(paths.resolved.config)
    copies = max(1, len(site.node_names))
    local = sum(
        max(0, needed.node_local_bytes - bytes_below(paths.node_local(node)))
        for node in site.node_names or ["this node"]
    )
    assert local <= copies * needed.node_local_bytes, f"{local} bytes for {copies} copies"
    return [
        Need("site.store", paths.store, _missing_in_store(paths, needed)),
        Need("site.results", Path(site.results), max(0, needed.run_bytes - bytes_below(paths.run))),
        Need("site.node_local", Path(site.node_local), local),
    ]


def check_writable(key: str, folder: Path) -> Finding:
    """Write and remove a small file in `folder`, or in its nearest existing parent."""
    existing = nearest_existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".posttrain-check-"):
            pass
    except OSError as error:
        remedy = f"choose another folder with set='{key}=...' or change its permissions"
        allowed = "a folder that can be written"
        return failed("not-writable", key, key, f"{folder}: {error.strerror} (at {existing})", allowed, remedy)
    return ok(key, f"{folder} can be written")


def require_writable(outputs: Iterable[str | Path]) -> None:
    """Check that the folders of the next outputs are writable and not full.

    Missing folders are checked at their nearest existing parent.

    Raises:
        OSError: A folder fails; names it.
    """
    for folder in sorted({nearest_existing(Path(output).parent) for output in outputs}):
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                written = file.write(bytes(TRIED_BYTES))
                # The last part of a short write raises the reason; a network file system raises it only on sync.
                file.write(bytes(TRIED_BYTES - written))
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(folder)
            raise


def check_free_space(needs: list[Need]) -> list[Finding]:
    """Compare each disk's required bytes with its free space; roots on one disk share it."""
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        by_disk.setdefault(os.stat(nearest_existing(need.folder)).st_dev, []).append(need)
    return [_check_disk(on_disk) for on_disk in by_disk.values()]


def bytes_below(folder: Path) -> int:
    """Return the bytes of all regular files below `folder`, without following links; 0 if it does not exist."""
    sizes: Mapping[tuple[int, int], int] = {
        (status.st_dev, status.st_ino): status.st_size
        for parent, _, names in os.walk(folder)
        for name in names
        if not os.path.islink(path := os.path.join(parent, name))
        for status in (os.stat(path),)
    }
    return sum(sizes.values())


def nearest_existing(folder: Path) -> Path:
    """Return `folder`, or its closest existing parent."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _missing_in_store(paths: Paths, needed: Storage) -> int:
    planned = {
        paths.hf: needed.hf,
        paths.torch_dist: needed.torch_dist,
        paths.rollout_fp8: needed.rollout_fp8,
        paths.rollout_start: needed.rollout_start,
        paths.export_fp8: needed.export_fp8,
    }
    return sum(max(0, size - bytes_below(folder) - bytes_below(partial_of(folder))) for folder, size in planned.items())


def _check_disk(needs: list[Need]) -> Finding:
    folder = nearest_existing(needs[0].folder)
    free = shutil.disk_usage(folder).free
    wanted = sum(need.missing_bytes for need in needs) + SPARE_BYTES
    keys = ", ".join(need.key for need in needs)
    name = f"free space for {keys}"
    if free >= wanted:
        return ok(name, f"{format_bytes(free)} free, {format_bytes(wanted)} needed")
    parts = ", ".join(f"{need.key} {format_bytes(need.missing_bytes)}" for need in needs)
    allowed = f"at least {format_bytes(wanted)} ({parts}, and {format_bytes(SPARE_BYTES)} to spare)"
    remedy = "free some space, or put a root on another disk with set='site.store=...' (see plan.html)"
    return failed("disk-too-small", name, keys, f"{format_bytes(free)} free on the disk of {folder}", allowed, remedy)

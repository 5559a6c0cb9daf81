"""A checkpoint's files from a folder on this machine: hard links where possible, else copies; all read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from posttrain.artifacts import FileRecord, Receipt, hash_file, record_file
from posttrain.checkpoint.file_placement import (
    TransferProgress,
    copy_file,
    explain_full_disk,
    hard_link,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.checkpoint.hub import is_needed
from posttrain.errors import CheckpointError, ConfigError, Problem
from posttrain.observability.progress import ProgressBar


def place_folder(
    origin: Path, folder: Path, receipt: Receipt | None = None, workers: int = 8
) -> tuple[FileRecord, ...]:
    """Give the needed files of a local checkpoint a second name in `folder`, or copy them from another file
    system.

    Args:
        origin: Folder in Hub layout; never written to.
        folder: The partial folder; right files that are there already are kept.
        receipt: Of the step that made `origin`; its hashes are then checked.
        workers: Files handled at a time.

    Returns:
        One record per file, sorted by path.

    Raises:
        ConfigError: There is no such folder, or nothing in it that is needed.
        CheckpointError: A file differs from the receipt.
        RuntimeError: No space on the disk.
    """
    names = _names_of(origin)
    folder.mkdir(parents=True, exist_ok=True)
    remove_half_written(folder)
    expected = {record.path: record for record in receipt.files} if receipt else {}
    unlinked = [name for name in names if not hard_link(origin / name, folder / name)]
    need = sum((origin / name).stat().st_size for name in unlinked if not _same_size(origin / name, folder / name))
    require_free_space(folder, need, f"the copy of {origin}")
    total = sum((origin / name).stat().st_size for name in names)
    with ProgressBar(f"take {origin.name}", total) as bar, explain_full_disk(folder):
        progress = TransferProgress(bar)
        records = run_parallel(lambda name: _place(origin, folder, name, progress), names, workers, progress)
    _compare(records, expected, origin)
    return tuple(records)


def _names_of(origin: Path) -> list[str]:
    key = "model.source.folder"
    if not origin.is_dir():
        allowed = "a folder with a checkpoint in Hub layout"
        raise ConfigError([Problem(key, str(origin), allowed, "check the path and that it is mounted here")])
    names = sorted(path.relative_to(origin).as_posix() for path in origin.rglob("*") if path.is_file())
    if not (found := [name for name in names if is_needed(name)]):
        allowed = "config.json, tokenizer and *.safetensors"
        raise ConfigError([Problem(key, str(origin), allowed, "give the folder that holds them directly")])
    return found


def _same_size(origin: Path, target: Path) -> bool:
    return target.is_file() and target.stat().st_size == origin.stat().st_size


def _place(origin: Path, folder: Path, name: str, progress: TransferProgress) -> FileRecord:
    source, target = origin / name, folder / name
    size = source.stat().st_size
    if target.is_file() and target.samefile(source):
        progress.advance(size)
        return record_file(folder, name)
    if _same_size(source, target) and hash_file(source) == hash_file(target):
        progress.advance(size)
        return record_file(folder, name)
    return FileRecord(name, size, copy_file(source, target, progress))


def _compare(records: Collection[FileRecord], expected: Mapping[str, FileRecord], origin: Path) -> None:
    found = {record.path: record.xxh3_128 for record in records}
    wrong = [
        f"{origin / name}: xxh3_128 {found.get(name, '(missing)')}, its receipt says {record.xxh3_128}"
        for name, record in sorted(expected.items())
        if is_needed(name) and found.get(name) != record.xxh3_128
    ]
    if wrong:
        raise CheckpointError(f"{origin} is not what its receipt says:\n  " + "\n  ".join(wrong))

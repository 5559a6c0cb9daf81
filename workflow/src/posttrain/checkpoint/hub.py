"""A repository's files from the Hugging Face Hub at a pinned commit, every one verified.

The transfer itself is `huggingface_hub`'s (endpoint, token, Xet and offline mode come from its own
environment variables). What is added: the Hub's list of files with sizes and hashes is kept beside the
folder, every file is compared with it before it gets its name, what an earlier attempt verified is not
fetched again, and the space on the disk is checked before the first byte.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import hf_hub_download
from tqdm.auto import tqdm

from posttrain.artifacts import FileRecord, record_file, write_atomic
from posttrain.checkpoint.file_placement import (
    TransferProgress,
    explain_full_disk,
    git_blob_hash,
    hash_twice,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.checkpoint.hub_listing import HubFile, HubSource, explained, list_files
from posttrain.errors import CheckpointError
from posttrain.observability.progress import ProgressBar

log = logging.getLogger(__name__)

NEEDED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
NOT_NEEDED = ("consolidated", "pytorch_model", "tf_model", "flax_model")
TEMPLATE_FOLDER = "additional_chat_templates"
STAGING = ".download"
ATTEMPTS_PER_FILE = 2


def is_needed(path: str) -> bool:
    """Tell whether a file of a model repository is weights, config, tokenizer or template.

    Example:
        "model-00001-of-00282.safetensors" and "tokenizer.json" are; "pytorch_model.bin",
        "original/params.json" and "modeling_custom.py" are not.
    """
    parts = PurePosixPath(path).parts
    if len(parts) == 2 and parts[0] == TEMPLATE_FOLDER:
        return path.endswith(".jinja")
    return len(parts) == 1 and path.endswith(NEEDED_SUFFIXES) and not path.startswith(NOT_NEEDED)


def download(
    source: HubSource,
    folder: Path,
    manifest: Path,
    needed: Callable[[str], bool] = is_needed,
    workers: int = 8,
) -> tuple[FileRecord, ...]:
    """Fetch the needed files of a repository into `folder` and verify each.

    Args:
        source: The repository at its commit.
        folder: The partial folder; right files that are there already are kept.
        manifest: See `manifest_of`.
        needed: Which files of the repository.
        workers: Files fetched at a time.

    Returns:
        One record per file, sorted by path.

    Raises:
        ConfigError: The repository, revision or file does not exist or may not be read.
        CheckpointError: The bytes are not those that the Hub lists; or offline and files are missing.
        RuntimeError: No connection, or no space on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_half_written(folder)
    _sweep_staging(folder)
    files = list_files(source, manifest, needed)
    if files is None:
        return _adopt_offline(source, folder, needed)
    if not files:
        raise CheckpointError(f"{source}: the repository holds none of the files that are needed")
    records = _keep_verified(source, folder, files, workers)
    missing = [file for file in files if file.path not in records]
    if missing:
        _refuse_offline(source, folder, missing)
        records |= _fetch_missing(source, folder, missing, workers)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    return tuple(records[file.path] for file in files)


# ---- online ----


def _keep_verified(source: HubSource, folder: Path, files: Collection[HubFile], workers: int) -> dict[str, FileRecord]:
    present = [file for file in files if (folder / file.path).is_file()]
    if not present:
        return {}
    with ProgressBar(f"verify {source}", sum(file.size_bytes for file in present)) as bar:
        progress = TransferProgress(bar)

        def verify(file: HubFile) -> FileRecord | None:
            record, reason = _verify(folder / file.path, file)
            progress.advance(file.size_bytes)
            if record is None:
                log.warning("%s is fetched again: %s", folder / file.path, reason)
            return record

        found = run_parallel(verify, present, workers, progress)
    return {record.path: record for record in found if record}


def _fetch_missing(
    source: HubSource, folder: Path, missing: Collection[HubFile], workers: int
) -> dict[str, FileRecord]:
    need = sum(file.size_bytes for file in missing)
    require_free_space(folder, need, f"the rest of {source}")
    log.info("%s: %d files of %.3f GB to fetch", source, len(missing), need / 1e9)
    with ProgressBar(f"download {source}", need) as bar, explain_full_disk(folder):
        progress = TransferProgress(bar)
        largest_first = sorted(missing, key=lambda file: -file.size_bytes)
        records = run_parallel(lambda file: _fetch(source, folder, file, progress), largest_first, workers, progress)
    return {record.path: record for record in records}


def _fetch(source: HubSource, folder: Path, file: HubFile, progress: TransferProgress) -> FileRecord:
    """Download one file into the staging folder, verify it there, then give it its name."""
    reason = ""
    for attempt in range(1, ATTEMPTS_PER_FILE + 1):
        with explained(source, file.path):
            staged = Path(
                hf_hub_download(
                    source.repo_id,
                    file.path,
                    repo_type=source.repo_type,
                    revision=source.revision,
                    local_dir=folder / STAGING,
                    endpoint=source.endpoint,
                    tqdm_class=_bar_class(progress),
                )
            )
        record, reason = _verify(staged, file)
        if record:
            _move(staged, folder / file.path)
            return record
        staged.unlink()
        progress.advance(-file.size_bytes)
        log.warning("%s: attempt %d of %d to fetch %s: %s", source, attempt, ATTEMPTS_PER_FILE, file.path, reason)
    raise CheckpointError(
        f"{source}: {file.path} arrives with wrong bytes, {ATTEMPTS_PER_FILE} times\n  {reason}\n"
        f"  remedy: look for a proxy or mirror between here and the Hub (HF_ENDPOINT), then run again"
    )


def _move(staged: Path, target: Path) -> None:
    write_atomic(target, lambda temporary: os.replace(staged, temporary))


def _verify(path: Path, file: HubFile) -> tuple[FileRecord | None, str]:
    """Return the record of a file that is what the Hub lists, or the reason why it is not."""
    size = path.stat().st_size
    if size != file.size_bytes:
        return None, f"{size} bytes, the Hub lists {file.size_bytes}"
    theirs = hashlib.sha256() if file.sha256 else git_blob_hash(size)
    ours = hash_twice(path, theirs)
    if theirs.hexdigest() != (file.sha256 or file.git_blob):
        kind = "SHA-256" if file.sha256 else "Git blob id"
        return None, f"{kind} {theirs.hexdigest()}, the Hub lists {file.sha256 or file.git_blob}"
    return FileRecord(file.path, size, ours, file.sha256), ""


def _bar_class(progress: TransferProgress) -> type[tqdm]:
    class ForwardingBar(tqdm):
        """Passes the library's counts on to our bar and shows nothing itself."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Leave out: Xet counts compressed bytes here, and the file's own in `update`."""

        def set_transfer_postfix_str(self, postfix: str, refresh: bool = False) -> None:
            """Leave out: nothing is shown."""

    return ForwardingBar


def _sweep_staging(folder: Path) -> None:
    """Delete the half files of killed downloads: the library gives each download a name of its own."""
    for path in (folder / STAGING).rglob("*.incomplete"):
        path.unlink()


# ---- without a network ----


def _refuse_offline(source: HubSource, folder: Path, missing: Collection[HubFile]) -> None:
    if not huggingface_hub.is_offline_mode():
        return
    listed = "\n  ".join(f"{file.path} ({file.size_bytes} bytes)" for file in list(missing)[:20])
    more = f"\n  and {len(missing) - 20} more" if len(missing) > 20 else ""
    raise CheckpointError(
        f"{source}: HF_HUB_OFFLINE is set and {folder} lacks {len(missing)} files, or holds them changed:\n  "
        f"{listed}{more}\n  remedy: unset HF_HUB_OFFLINE, or put the files there"
    )


def _adopt_offline(source: HubSource, folder: Path, needed: Callable[[str], bool]) -> tuple[FileRecord, ...]:
    """Record what lies in `folder`: the Hub was never asked, so only its own index can be checked."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names = [name for name in names if needed(name)]
    if not names:
        raise CheckpointError(
            f"{source}: HF_HUB_OFFLINE is set and {folder} holds no files\n"
            f"  remedy: unset HF_HUB_OFFLINE, or put a complete copy of the repository there"
        )
    log.warning(
        "%s: offline, and the Hub's hashes are not known here: %s is checked by its layout only",
        source,
        folder,
    )
    return tuple(record_file(folder, name) for name in names)

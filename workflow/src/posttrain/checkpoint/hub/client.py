"""Downloads and verifies a repository's files from the Hugging Face Hub at a pinned commit.

Endpoint, token and offline mode are `huggingface_hub`'s own environment variables. The Hub's list of files with sizes
and hashes is stored next to the folder, and every file is compared with it before it is renamed. Verified files of an
earlier attempt are kept, partial ones are resumed, and disk space is checked before the first byte.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import huggingface_hub

from posttrain.checkpoint.hub.listed_files import ListedFile, Manifest
from posttrain.checkpoint.hub.listing import HubSource, list_files
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.hub.transfer import STAGING, HttpFiles
from posttrain.checkpoint.hub.xet import XetFiles
from posttrain.checkpoint.parts.fill_folder import keep_right_files, make_files
from posttrain.checkpoint.staging.file_placement import remove_half_written
from posttrain.errors import CheckpointError
from posttrain.store import FileRecord, RelativeName

log = logging.getLogger(__name__)

# Weights, configuration, chat templates and tokenizer files.
NEEDED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
# The same weights in other libraries' formats.
NOT_NEEDED = ("consolidated", "pytorch_model", "tf_model", "flax_model")
TEMPLATE_FOLDER = "additional_chat_templates"
# About a terminal's height, with the message; GLM-5 has 282 shards.
MAX_NAMED_FILES = 20


@dataclass(frozen=True)
class FetchOptions:
    """Options of a download.

    Args:
        num_workers: Concurrent files.
        xet: Use the library's transfer, with Xet if the repository supports it.
        rule: Limits of retries.
    """

    num_workers: int = 8
    xet: bool = False
    rule: RetryRule = field(default_factory=RetryRule)


def is_needed(path: str) -> bool:
    """Return whether a file of a model repository is weights, config, tokenizer or template.

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
    kept: Path,
    needed: Callable[[str], bool] = is_needed,
    options: FetchOptions | None = None,
) -> tuple[FileRecord, ...]:
    """List and fetch the needed files of a repository into `folder`, and verify each.

    Args:
        source: The repository at its commit.
        folder: The partial folder; valid files in it are kept.
        kept: Path of the Hub's stored answer, see `store.manifest_of`.
        needed: Selects files of the repository.
        options: Options of the download.

    Returns:
        One record per file, sorted by path.

    Raises:
        ConfigError: The repository, revision or file does not exist or is not accessible.
        CheckpointError: The bytes differ from the Hub's list, or files are missing offline.
        RuntimeError: No connection.
        OSError: No space on the disk.
    """
    options = options or FetchOptions()
    folder.mkdir(parents=True, exist_ok=True)
    manifest = list_files(source, kept, needed, options.rule) or list_what_lies_there(source, folder, needed)
    records = fetch_files(source, folder, manifest.files, manifest, options)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    return tuple(sorted(records, key=lambda record: record.path))


def fetch_files(
    source: HubSource, folder: Path, files: Collection[ListedFile], manifest: Manifest, options: FetchOptions
) -> tuple[FileRecord, ...]:
    """Fetch some of the listed files into `folder`; see `download`.

    Args:
        source: The repository at its commit.
        folder: The partial folder, which other jobs may fill at the same time.
        files: This job's files.
        manifest: The complete list.
        options: Options of the download.
    """
    remove_half_written(folder)
    label = str(source)
    maker = (XetFiles if options.xet else HttpFiles)(source, options.rule)
    records = keep_right_files(maker, folder, files, label, options.num_workers)
    missing = [file for file in files if file.path not in records]
    if missing:
        _refuse_offline(source, folder, missing)
        records |= make_files(maker, folder, missing, f"the download of {label}", options.num_workers, manifest.files)
    return tuple(records[file.path] for file in files)


# ---- without a network ----


def list_what_lies_there(source: HubSource, folder: Path, needed: Callable[[str], bool] = is_needed) -> Manifest:
    """List the files in `folder` if the Hub was never queried: names and sizes, no hashes.

    Raises:
        CheckpointError: The folder has no files.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = [
        ListedFile(RelativeName(name, folder), path.stat().st_size) for name, path in paths.items() if needed(name)
    ]
    if not files:
        raise CheckpointError(
            "offline-without-files",
            f"{source}: HF_HUB_OFFLINE is set and {folder} holds no files\n"
            f"  remedy: unset HF_HUB_OFFLINE, or put a complete copy of the repository there",
        )
    log.warning(
        "%s: offline, and the Hub's hashes are not known here: %s is checked by its layout only", source, folder
    )
    return Manifest(source.identity, tuple(sorted(files, key=lambda file: file.path)))


def _refuse_offline(source: HubSource, folder: Path, missing: Collection[ListedFile]) -> None:
    unknown = [file for file in missing if not file.content_id]
    if not huggingface_hub.is_offline_mode() and not unknown:
        return
    named = list(missing)[:MAX_NAMED_FILES]
    listed = "\n  ".join(f"{file.path} ({file.size_bytes} bytes)" for file in named)
    more = f"\n  and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
    why = "were listed offline, without their hashes" if unknown else "cannot be fetched: HF_HUB_OFFLINE is set"
    remedy = "delete the list of files and run again online" if unknown else "unset HF_HUB_OFFLINE"
    raise CheckpointError(
        "offline-files-incomplete",
        f"{source}: {folder} lacks {len(missing)} files, or holds them changed, and they {why}:\n  {listed}{more}\n"
        f"  remedy: {remedy}, or put the files there",
    )

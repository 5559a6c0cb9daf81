"""Where a chain of receipts begins: the Hub's list of files, a local folder, a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts import FileRecord, Receipt, hash_file
from posttrain.checkpoint.file_placement import git_blob_hash, hash_twice
from posttrain.checkpoint.hub_listing import manifest_of
from posttrain.observability.provenance import Artefact


def check_source(artefact: Artefact) -> tuple[str, list[str]]:
    """Return in words what an artefact without inputs came from, and what is wrong with that.

    Args:
        artefact: One whose receipt names no other.
    """
    receipt = artefact.receipt
    assert receipt is not None
    if receipt.step != "download_hf_checkpoint":
        settings = receipt.settings
        named = [
            str(settings[key]) for key in ("kind", "repo_id", "revision", "train_file", "seed") if settings.get(key)
        ]
        return " ".join([receipt.step, *named]), []
    if "repo_id" in receipt.settings:
        return _check_hub(artefact.folder, receipt)
    return _check_folder(Path(receipt.settings["folder"]), artefact.folder, receipt)


def _check_hub(folder: Path, receipt: Receipt) -> tuple[str, list[str]]:
    identity = {key: receipt.settings[key] for key in ("repo_id", "revision")}
    manifest = manifest_of(folder)
    source = f"Hub: {identity['repo_id']} at {identity['revision'][:12]}"
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        listed = {row["path"]: row for row in content["files"]}
        asked = {key: content["source"][key] for key in identity}
    except FileNotFoundError:
        return source, [f"{manifest}: missing: nothing proves what the Hub had"]
    except (ValueError, KeyError, TypeError) as error:
        return source, [f"{manifest}: not the Hub's list of files ({error})"]
    if asked != identity:
        return source, [f"{manifest}: lists {asked}, the receipt is about {identity}"]
    return source, [why for record in receipt.files if (why := _unlike_hub(folder, record, listed.get(record.path)))]


def _unlike_hub(folder: Path, record: FileRecord, row: Mapping[str, Any] | None) -> str:
    """Tell how a file's receipt differs from the Hub's list; small files, of which it has Git's id, are read."""
    path = folder / record.path
    if row is None:
        return f"{path}: not in the Hub's list"
    if (row["size_bytes"], row["sha256"]) != (record.size_bytes, record.sha256):
        return f"{path}: the Hub lists {row['size_bytes']} bytes, SHA-256 {row['sha256'] or '(none)'}"
    if row["git_blob"] and path.is_file():
        blob = git_blob_hash(path.stat().st_size)
        hash_twice(path, blob)
        if blob.hexdigest() != row["git_blob"]:
            return f"{path}: content differs from the Hub's Git id {row['git_blob']}"
    return ""


def _check_folder(origin: Path, folder: Path, receipt: Receipt) -> tuple[str, list[str]]:
    source = f"folder: {origin}"
    if not origin.is_dir():
        return source, [f"{origin}: the folder that the files were taken from is gone"]
    changed = [record.path for record in receipt.files if not _is_same(origin / record.path, folder, record)]
    return source, [f"{origin / name}: missing or changed since it was taken" for name in changed]


def _is_same(path: Path, folder: Path, record: FileRecord) -> bool:
    """Compare a file of the source; one that is only another name of ours is read with ours."""
    if not path.is_file():
        return False
    ours = folder / record.path
    return (ours.is_file() and path.samefile(ours)) or hash_file(path) == record.xxh3_128

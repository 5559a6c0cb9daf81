"""The origin of a chain of receipts: the Hub's list of files, a local folder, or a seed."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.hub.download_parts import origin_of
from posttrain.checkpoint.hub.listed_files import ListedFile, read_manifest, verify_file
from posttrain.errors import CheckpointError
from posttrain.report.provenance import Artifact
from posttrain.store import FileRecord, Receipt, hash_file, manifest_of

STEP = "finalize_hf_checkpoint"
# Settings that name the origin in receipts of other steps.
NAMES_OF_SOURCES = ("kind", "repo_id", "revision", "train_file", "seed")


def check_source(artefact: Artifact) -> tuple[str, list[str]]:
    """Describe the origin of an artefact without inputs; return it with the problems found.

    Args:
        artefact: An artefact whose receipt names no inputs.
    """
    receipt = artefact.receipt
    assert receipt is not None
    if receipt.step != STEP:
        named = [str(receipt.settings[key]) for key in NAMES_OF_SOURCES if receipt.settings.get(key)]
        return " ".join([receipt.step, *named]), []
    try:
        manifest = read_manifest(manifest_of(artefact.folder))
    except CheckpointError as error:
        return "unknown", [f"{error}: nothing proves what the source had"]
    source, listed = manifest.source, {file.path: file for file in manifest.files}
    inputs, settings = origin_of(manifest)
    if (inputs, settings) != (dict(receipt.inputs), dict(receipt.settings)):
        return "unknown", [f"{manifest_of(artefact.folder)}: not the list that {artefact.receipt_path} is about"]
    problems = [why for r in receipt.files if (why := _unlike_list(artefact.folder, r, listed.get(r.path)))]
    if "folder" in source:
        return f"folder: {source['folder']}", [
            *problems,
            *_check_folder(Path(source["folder"]), artefact.folder, receipt),
        ]
    return f"Hub: {source['repo_id']} at {source['revision'][:12]}", problems


def _unlike_list(folder: Path, record: FileRecord, listed: ListedFile | None) -> str:
    """Return how a file's receipt differs from the list; reads small files, for which the Hub has only Git's id."""
    path = folder / record.path
    if listed is None:
        return f"{path}: not in the list of its source"
    if (listed.size_bytes, listed.sha256) != (record.size_bytes, record.sha256):
        return f"{path}: the list has {listed.size_bytes} bytes, SHA-256 {listed.sha256 or '(none)'}"
    if listed.git_blob and path.is_file() and (reason := verify_file(path, listed)[1]):
        return f"{path}: {reason}"
    return ""


def _check_folder(origin: Path, folder: Path, receipt: Receipt) -> list[str]:
    if not origin.is_dir():
        return [f"{origin}: the folder that the files were taken from is gone"]
    changed = [record.path for record in receipt.files if not _is_same(origin / record.path, folder, record)]
    return [f"{origin / name}: missing or changed since it was taken" for name in changed]


def _is_same(path: Path, folder: Path, record: FileRecord) -> bool:
    """Compare a file of the source; reads it unless it is a hard link of ours."""
    if not path.is_file():
        return False
    ours = folder / record.path
    return (ours.is_file() and path.samefile(ours)) or hash_file(path) == record.xxh3_128

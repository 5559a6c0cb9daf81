"""Recorded, reversible changes of JSON files.

`posttrain_patch.json` is in the folder of the changed files: {file: [{op, path, old, new}]}. `path` is a JSON pointer
to a key at the top or in a section of it; "replace" changes its value, "rename" its name at the same position, "remove"
deletes it. Changes are idempotent; a value that is neither the old nor the new one is rejected.

"write" records a whole file that was added or replaced (SHA-256 before and after), "split" a tensor that was stored in
another form (before and after). Only added files can be reverted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.config_sections import TEXT, VISION
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.errors import CheckpointError
from posttrain.store import sync_folder, write_json, write_text

PATCH_FILE = "posttrain_patch.json"
# Changes of whole files instead of JSON keys.
WHOLE_FILES = ("write", "split")


@dataclass(frozen=True)
class Change:
    """One change of one key.

    Args:
        op: "replace", "rename" or "remove" of a key, or "add", which reverts "remove"; "write" of a file, "split" of a
            tensor.
        path: "/" and the key before the change, or "/SECTION/KEY" in a section.
        old: The value before the change, or the key (rename).
        new: The value after the change, or the key (rename).
    """

    op: str
    path: str
    old: Any
    new: Any

    @property
    def reverse(self) -> Change:
        """The inverse change."""
        path = f"/{self.new}" if self.op == "rename" else self.path
        opposite = {"remove": "add", "add": "remove"}
        return Change(opposite.get(self.op, self.op), path, self.new, self.old)


def apply_changes(content: Mapping[str, Any], changes: Sequence[Change], file: str) -> dict[str, Any]:
    """Return `content` with the changes applied; keys keep their order.

    Args:
        content: A JSON object; not modified.
        changes: Changes in the order of application.
        file: Name for error messages.

    Raises:
        CheckpointError: A value is neither the old nor the new one.
    """
    result = dict(content)
    for change in changes:
        result = _apply(result, change, file)
    return result


def write_patched(
    folder: Path, patched: Mapping[str, Mapping[str, Any]], patch: Mapping[str, Sequence[Change]]
) -> None:
    """Write changed files durably, then the record of the changes.

    Args:
        folder: Folder of the files.
        patched: File name -> its content after the changes.
        patch: File name -> its changes.
    """
    for name, content in patched.items():
        _write_object(folder / name, content)
    rows = {name: [dataclasses.asdict(change) for change in changes] for name, changes in patch.items()}
    write_json(folder / PATCH_FILE, rows)


def read_patch(folder: Path) -> dict[str, list[Change]]:
    """Return the recorded changes of a folder: file name -> changes; empty without a record.

    Raises:
        CheckpointError: The record is invalid.
    """
    if not (folder / PATCH_FILE).exists():
        return {}
    try:
        return {name: [Change(**row) for row in rows] for name, rows in read_object(folder / PATCH_FILE).items()}
    except TypeError as error:
        raise CheckpointError(
            "patch-unreadable", f"{folder / PATCH_FILE}: not a record of changes ({error})"
        ) from error


def undo_patch(folder: Path) -> None:
    """Revert the recorded changes of a folder's files, then delete the record.

    Raises:
        CheckpointError: A file has changed since, or the record lacks its original content.
    """
    patch = read_patch(folder)
    whole = {name: changes for name, changes in patch.items() if changes[0].op in WHOLE_FILES}
    if lost := [name for name, changes in whole.items() if changes[0].old is not None]:
        raise CheckpointError("origin-lost", f"{folder}: {', '.join(lost)} replaced the origin's; take them from there")
    for name, changes in patch.items():
        if name in whole:
            (folder / name).unlink(missing_ok=True)
            continue
        restored = apply_changes(read_object(folder / name), [c.reverse for c in reversed(changes)], name)
        _write_object(folder / name, restored)
    (folder / PATCH_FILE).unlink(missing_ok=True)
    sync_folder(folder)


def _apply(content: dict[str, Any], change: Change, file: str) -> dict[str, Any]:
    key = change.path.removeprefix("/")
    section, _, below = key.partition("/")
    if below and section in (TEXT, VISION):
        if not isinstance(content.get(section), dict):
            raise CheckpointError("patch-does-not-apply", f"{file}: no section {section!r}, found {sorted(content)}")
        change = dataclasses.replace(change, path=f"/{below}")
        return {**content, section: _apply(content[section], change, f"{file}: {section}")}
    if change.op == "rename":
        if change.new in content and key not in content:
            return content
        if key in content and change.new not in content:
            return {change.new if name == key else name: value for name, value in content.items()}
        raise CheckpointError(
            "patch-does-not-apply",
            f"{file}: expected one of the keys {key!r} and {change.new!r}, found {sorted(content)}",
        )
    if change.op in ("remove", "add"):
        present, absent = (change.old, False) if change.op == "remove" else (change.new, True)
        if key in content and content[key] != present:
            raise CheckpointError(
                "patch-does-not-apply", f"{file}: {key} is {content[key]!r}, expected {present!r} or none"
            )
        rest = {name: value for name, value in content.items() if name != key}
        return {**rest, key: present} if absent else rest
    assert change.op == "replace", f"unknown change {change}"
    if content.get(key) not in (change.old, change.new):
        raise CheckpointError(
            "patch-does-not-apply", f"{file}: {key} is {content.get(key)!r}, neither {change.old!r} nor {change.new!r}"
        )
    return {**content, key: change.new}


def _write_object(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

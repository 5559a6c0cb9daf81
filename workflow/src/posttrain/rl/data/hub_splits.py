"""Finds the files of a split in a dataset repository, by its card or else by file names.

Both follow the Hub's conventions: https://huggingface.co/docs/hub/datasets-manual-configuration and
https://huggingface.co/docs/hub/datasets-file-names-and-splits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import yaml

from posttrain.rl.data.raw_rows import SUFFIXES

CARD = "README.md"
DEFAULT_SUBSET = "default"
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_NAMES_OF_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def matching(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the paths that match a pattern, sorted; `*` matches within a folder, `**` across folders."""
    return sorted(path for path in paths if any(_matches(path, pattern) for pattern in patterns))


def files_of_split(card: str, paths: Sequence[str], subset: str, split: str) -> list[str]:
    """Return the files of a split.

    Args:
        card: Text of the repository's README.md; empty if it has none.
        paths: All files of the repository.
        subset: One of the card's configurations, or a folder; empty: the default.
        split: "train", "test", ...
    """
    patterns = _patterns_of_card(card, subset, split)
    return matching(paths, patterns) if patterns is not None else _files_by_name(paths, subset, split)


def _matches(path: str, pattern: str) -> bool:
    is_deep = "**" in pattern
    return fnmatchcase(path, pattern) and (is_deep or path.count("/") == pattern.count("/"))


def _patterns_of_card(card: str, subset: str, split: str) -> list[str] | None:
    """Return the card's file patterns for a split; None if it names no files."""
    found = _FRONT_MATTER.match(card)
    try:
        configs = (yaml.safe_load(found[1]) or {}).get("configs") if found else None
    except (yaml.YAMLError, AttributeError):
        return None
    named = {row.get("config_name", DEFAULT_SUBSET): row for row in configs or [] if isinstance(row, dict)}
    if not any("data_files" in row for row in named.values()):
        return None
    chosen = next((row for row in named.values() if row.get("default")), named.get(DEFAULT_SUBSET))
    if chosen is None and len(named) == 1:
        chosen = next(iter(named.values()))
    row = named.get(subset) if subset else chosen
    return _patterns_of_config((row or {}).get("data_files"), split)


def _patterns_of_config(data_files: Any, split: str) -> list[str]:
    rows = data_files if isinstance(data_files, list) else [data_files] if data_files else []
    patterns: list[str] = []
    for row in rows:
        # Without splits, all files are for training.
        of, path = (row.get("split"), row.get("path", [])) if isinstance(row, dict) else ("train", row)
        if of == split:
            patterns += [path] if isinstance(path, str) else path
    return patterns


def _files_by_name(paths: Sequence[str], subset: str, split: str) -> list[str]:
    files = [path for path in paths if path.endswith(SUFFIXES) and (not subset or subset in PurePosixPath(path).parts)]
    named = [path for path in files if _is_called(path, split)]
    if (
        not named
        and split == "train"
        and not any(_is_called(path, name) for path in files for name in _NAMES_OF_SPLITS)
    ):
        return sorted(files)
    return sorted(named)


def _is_called(path: str, split: str) -> bool:
    return re.search(rf"(?:^|[-._/ ]){re.escape(split)}(?:[-._/ ]|$)", path) is not None

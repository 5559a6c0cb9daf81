"""The names by which models of `config/models` are known: their files and their repositories."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from posttrain.config.load import read_yaml


def known_models(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield (a name without its punctuation, ours) of each model's file and repository."""
    for folder in folders:
        for path in sorted((folder / "models").glob("*.yaml")):
            yield plain_name(path.stem), path.stem
            source = read_yaml(path).get("model", {}).get("source", {})
            if repository := source.get("repo_id"):
                yield plain_name(repository.rpartition("/")[2]), path.stem


def plain_name(name: str) -> str:
    """Return a name without what projects write in different ways."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())

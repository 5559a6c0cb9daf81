"""Names of the models in `config/models`: their files and repositories."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from posttrain.config.load import read_yaml


def known_models(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield (plain name, our name) for each model's file and repository."""
    for folder in folders:
        for path in sorted((folder / "models").glob("*.yaml")):
            yield plain_name(path.stem), path.stem
            source = read_yaml(path).get("model", {}).get("source", {})
            if repository := source.get("repo_id"):
                yield plain_name(repository.rpartition("/")[2]), path.stem


def plain_name(name: str) -> str:
    """Return a name without the punctuation in which projects differ."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())

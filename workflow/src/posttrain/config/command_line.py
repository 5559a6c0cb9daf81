"""Reads the command line of `posttrain` as Snakemake reads `--configfile` and `--config`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.config.strict_yaml import read_mapping
from posttrain.errors import ConfigError, Problem, raise_if_any

# The folder of the clone that contains this package.
CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def read_request(config_dir: Path, files: Iterable[Path], words: Iterable[str]) -> dict[str, Any]:
    """Return the mapping that Snakemake would pass to `config.load.resolve`.

    Args:
        config_dir: The folder `config/`.
        files: YAML files, later ones win.
        words: `key=value`, which win over all files.

    Raises:
        ConfigError: A file cannot be read, or a word is not `key=value`.
    """
    words = list(words)
    remedy = "a value of the configuration stands inside of set='key=value'"
    bad = [word for word in words if not re.match(r"[A-Za-z_]\w*=", word)]
    raise_if_any([Problem("not-key-value", word, "no key=value", "model=glm5, and the like", remedy) for word in bad])
    request = with_defaults({}, config_dir)
    for path in files:
        request = _over(request, read_mapping(path))
    for key, _, text in (word.partition("=") for word in words):
        request = _over(request, {key: _value(text.strip("'\""))})
    return request


def with_defaults(request: Mapping[str, Any], config_dir: Path) -> dict[str, Any]:
    """Merge a request into `workflow.yaml`, which Snakemake skips for a module that has a `config:`."""
    return _over(read_mapping(config_dir / "workflow.yaml"), request)


def check_files(files: Iterable[Path]) -> None:
    """Read the files of `--configfile` strictly, because Snakemake silently kept the last of duplicate keys.

    Raises:
        ConfigError: Contains every problem of every file.
    """
    problems: list[Problem] = []
    for path in files:
        try:
            read_mapping(path)
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)


def _value(text: str) -> Any:
    """Return the value that Snakemake reads from the text after `key=`."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    try:
        return {"": None, "True": True, "False": False}.get(text, yaml.load(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError:
        return text


def _over(lower: Any, upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with another merged into it, section by section and key by key."""
    merged = dict(lower) if isinstance(lower, Mapping) else {}
    for key, value in upper.items():
        merged[key] = _over(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged

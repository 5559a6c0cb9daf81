"""What `posttrain` is asked for on its command line, read as Snakemake reads `--configfile` and `--config`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import ConfigError, Problem, raise_if_any

# Of the clone that this package lies in.
CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def read_request(config_dir: Path, files: Iterable[Path], words: Iterable[str]) -> dict[str, Any]:
    """Return the mapping that Snakemake would hand over to `config.load.resolve`.

    Args:
        config_dir: The folder `config/`.
        files: YAML files, later ones win.
        words: `key=value`, which win over all files.

    Raises:
        ConfigError: A file is not to be read, or a word has another form.
    """
    words = list(words)
    remedy = "a value of the configuration stands inside of set='key=value'"
    bad = [word for word in words if not re.match(r"[A-Za-z_]\w*=", word)]
    raise_if_any([Problem(word, "no key=value", "model=glm5, and the like", remedy) for word in bad])
    request: dict[str, Any] = {}
    for path in (config_dir / "workflow.yaml", *files):
        request = _over(request, _read(path))
    for key, _, text in (word.partition("=") for word in words):
        request = _over(request, {key: _value(text.strip("'\""))})
    return request


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no keys at its top level")
    except (OSError, ValueError, yaml.YAMLError) as error:
        remedy = "correct the path or the file"
        raise ConfigError([Problem(str(path), str(error), "a YAML file of keys and values", remedy)]) from error
    return content


def _value(text: str) -> Any:
    """Return what Snakemake makes of the text behind `key=`."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    try:
        return {"": None, "True": True, "False": False}.get(text, yaml.load(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError:
        return text


def _over(lower: Any, upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with another on top, sections merged key by key."""
    merged = dict(lower) if isinstance(lower, Mapping) else {}
    for key, value in upper.items():
        merged[key] = _over(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged

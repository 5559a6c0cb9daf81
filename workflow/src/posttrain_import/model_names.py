"""Finds the model of `config/models` for a checkpoint's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from posttrain.config.fields import did_you_mean
from posttrain.config.model_names import known_models, plain_name
from posttrain.errors import ConfigError, Problem
from posttrain_import.script import Script

# Suffixes of a model's name for copies in other formats.
FORMS = re.compile(r"[-_](fp8|bf16|int4|nvfp4|mxfp8|torch_dist)$", re.IGNORECASE)


def model_of(script: Script, folders: Iterable[Path]) -> str:
    """Return the model of a script's `--hf-checkpoint`.

    Args:
        script: A launch script.
        folders: Folders with the layout of `config/`.

    Raises:
        ConfigError: The script names no known model.
    """
    given = script.flags.get("--hf-checkpoint")
    # Unknown parts of the path come before the folder's name.
    name = "".join(given.values[:1] if given else ()).rstrip("/").rpartition("/")[2]
    known = dict(known_models(folders))
    plain = plain_name(FORMS.sub("", name))
    if plain in known:
        return known[plain]
    remedy = "say which with model=NAME, beside the script"
    if near := did_you_mean(plain, known) if plain else None:
        remedy = f"{remedy}: did you mean {known[near.split(chr(39))[1]]!r}?"
    found = f"{name!r} ({given.place})" if given and name else "not given"
    allowed = f"a model of config/models: {', '.join(sorted(set(known.values())))}"
    raise ConfigError([Problem("unknown-name", "--hf-checkpoint", found, allowed, remedy)])

"""Parses `set=`: `key=value` words with a shell's quoting."""

from __future__ import annotations

import shlex
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from posttrain.config import schema
from posttrain.config.fields import general_key, leaf_types, leaves_of
from posttrain.config.strict_yaml import faults_of


def parse_overrides(text: str) -> dict[str, Any]:
    """Return dotted key -> value of `key=value key=value`.

    A value is YAML, but values of text keys are kept as written: `model.source.revision=12e4567` is not infinity.

    Raises:
        ValueError: A word is not `key=value`, or a value is not safe to parse.
    """
    words = shlex.split(text)
    written = {}
    for key, sign, value in (word.partition("=") for word in words):
        if not key or not sign:
            raise ValueError(f"{key + sign!r} has no '=' behind a key")
        written[key] = value
    try:
        texts = {key: value for key, value in written.items() if leaf_types(schema.Config).get(general_key(key)) is str}
        for key, value in written.items():
            faults = [] if key in texts else list(faults_of(value))
            if faults:
                found, allowed, remedy = faults[0]
                raise ValueError(f"{key}: {found.partition(': ')[2]}; allowed: {allowed}; {remedy}")
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(str(error)) from error
    assert isinstance(parsed, dict)
    return {key: _as_written(value, texts.get(key)) for key, value in leaves_of(parsed).items()}


def _as_written(value: Any, text: str | None) -> Any:
    """Return the original text if YAML read it as another type; null stays None, and YAML removes quotes."""
    return value if text is None or value is None or isinstance(value, str) else text

"""Renders an import's configuration for `--configfile`; each value has a comment with its flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from posttrain.config import schema
from posttrain.config.fields import leaf_types, walk
from posttrain.errors import one_line
from posttrain_import.importing import Imported, Told, workflow_of

_HEADER = """\
# From {script}, by `posttrain import-flags`. A value that does not stand here is our default for this model.
# `posttrain plan --configfile` with this file tells what it takes; docs/coming-from.md, what is different here.
"""


def render(found: Imported, script: str) -> str:
    """Return the configuration as YAML.

    Args:
        found: The imported script.
        script: The script's name.
    """
    lines = [_HEADER.format(script=one_line(script)), *_lines(found)]
    if found.missed:
        lines += ["", "# Not taken over:"]
        lines += [f"#   {one_line(_spelled(told))}" for told in found.missed]
    return "\n".join(lines) + "\n"


def _lines(found: Imported) -> Iterator[str]:
    place = {key: number for number, key in enumerate(leaf_types(schema.Config))}
    ordered = dict(sorted(found.values.items(), key=lambda item: place[item[0]]))
    workflow = workflow_of(Imported(found.names, values=ordered))
    for name in found.implied:
        if isinstance(workflow.get(name), str):
            del workflow[name]
    for depth, key, dotted, value in walk(workflow):
        indent = "  " * depth
        if isinstance(value, dict):
            yield f"{indent}{key}:" if depth else f"\n{key}:"
        else:
            sources = found.sources.get(dotted, [])
            comment = f"  # {one_line('; '.join(sources))}" if sources else ""
            yield f"{indent}{key}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    # YAML needs a dot before the exponent of a float.
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _spelled(told: Told) -> str:
    flag = " ".join(part for part in (told.flag, told.value, f"({told.place})" if told.place else "") if part)
    return ": ".join(part for part in (flag, told.about) if part)

"""Generates config/README.md and config/schema.json from the schema.

    python -m posttrain.config.docs > config/README.md
    python -m posttrain.config.docs --schema > config/schema.json

A test compares the files with this output, so the reference matches what the code accepts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config import schema
from posttrain.config.fields import members, row_of
from posttrain.config.load import read_yaml
from posttrain.config.presets import PRESETS
from posttrain.config.request import CHOSEN, FORK, RUN_NAME, WORKFLOW_KEYS

INTRODUCTION = """\
# Configuration

This file is generated: `python -m posttrain.config.docs > config/README.md`. So is `schema.json`
(`--schema > config/schema.json`), with which editors complete and check keys. Your own files refer to it in their
first line, like the files here: `# yaml-language-server: $schema=/path/to/posttrain/config/schema.json`.

Values are in this folder, their types in `posttrain.config.schema`. Layers are merged in this order; later ones win:

1. the schema's defaults, for engineering knobs
2. `base.yaml`: the experiment, the same for all node counts
3. the line of `algorithms.yaml` that `algorithm.preset` names, which any layer may choose
4. `models/{model}.yaml`: source, dimensions and other values of the model; default node count and hardware
5. `recipes/{recipe}.yaml`, chosen with `recipe=`: a different batch
6. `nodes/{model}_{nodes}.yaml`, if it exists: the layout for this number of nodes with 8 GPUs each
7. `hardware/{hardware}.yaml`
8. `sites/{site}.yaml`: the cluster
9. sections in your own file, `--configfile my.yaml`: `optimizer: {lr: 1e-4}`. A section `model`, `hardware` or `site`
   names the file that it changes with its key `name`
10. `set='key=value key=value'` on the command line

`workflow.yaml` and `--config` choose the files, with the keys %(workflow_keys)s.
Your own files can be in another folder: `configs=/my/folder` adds a folder with `models/`, `recipes/`, `nodes/`,
`hardware/` or `sites/`, whose files are chosen by name like those of this folder.
Every key and value of every layer is checked, and all mistakes are reported at once, each with its file and a remedy.
`config.resolved.yaml` in a run's folder shows every value with the layer that set it.

The sections %(experiment)s define what is learned: their digest
names the run. All other sections may change from attempt to attempt of the same run.

| choice | files |
|---|---|
%(choices)s
"""

TYPE_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    list[str]: "list of text",
}
JSON_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    list[str]: {"type": "array", "items": {"type": "string"}},
}
JSON_LIMITS = {
    "choices": "enum",
    "minimum": "minimum",
    "exclusive_minimum": "exclusiveMinimum",
    "maximum": "maximum",
}
# Keys of `--config` that are no sections.
REQUEST_SCHEMA: dict[str, dict[str, Any]] = {
    "recipe": {"description": "A file of recipes/: a different batch", "type": "string"},
    "configs": {"description": "Your own folder, with the layout of config/", "type": "string"},
    "run": {"description": "Name of the run", "type": "string", "pattern": f"^{RUN_NAME}$"},
    "fork": {"description": "RUN@STEP: the state to start from", "type": "string", "pattern": f"^{FORK}$"},
    "set": {"description": "Values: KEY=VALUE KEY=VALUE", "type": "string"},
    "quick": {"description": "Whether `rehearse` takes few layers and three stages of each pipeline", "enum": [0, 1]},
    "lengths": {"description": "A file of sample lengths for `rehearse`", "type": "string"},
    "expert_imbalance": {
        "description": "Rows at the busiest rank's experts over the mean, for `rehearse`",
        "type": "number",
        "minimum": 1,
    },
    "gc": {"description": "Whether the rule gc deletes", "enum": ["show", "delete"]},
}
CHOICE_FOLDERS = {"model": "models", "recipe": "recipes", "nodes": "nodes", "hardware": "hardware", "site": "sites"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key of the configuration."""

    key: str
    doc: str
    kind: str
    default: str
    allowed: str


def render_readme(config_dir: Path) -> str:
    """Return the content of config/README.md.

    Args:
        config_dir: The folder `config/`, in whose files values without a default are set.
    """
    set_in = values_by_layer(config_dir)
    introduction = INTRODUCTION % {
        "workflow_keys": ", ".join(f"`{key}`" for key in WORKFLOW_KEYS),
        "experiment": ", ".join(f"`{name}`" for name in schema.EXPERIMENT_SECTIONS),
        "choices": "\n".join(_choice_row(config_dir, key, folder) for key, folder in CHOICE_FOLDERS.items()),
    }
    parts = [introduction]
    for name, section in sections(schema.Config):
        parts.append(_section(name, section, set_in))
    return "\n".join(parts)


def sections(section: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield (dotted name, dataclass) of every section, parents first; the root has the name ""."""
    yield prefix, section
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name = f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from sections(hints[field.name], name)
        elif row := row_of(hints[field.name]):
            yield from sections(row, f"{name}.NAME")


def entries(name: str, section: type, set_in: Mapping[str, str]) -> list[Entry]:
    """Return the keys of a section, without those of its subsections."""
    hints, prefix = typing.get_type_hints(section), f"{name}." if name else ""
    return [
        Entry(
            key=f"{prefix}{field.name}",
            doc=field.metadata["doc"],
            kind=TYPE_NAMES[hints[field.name]],
            default=_default(field, set_in.get(f"{prefix}{field.name}", "")),
            allowed=_allowed(field.metadata),
        )
        for field in dataclasses.fields(section)
        if hints[field.name] in TYPE_NAMES
    ]


def values_by_layer(config_dir: Path) -> dict[str, str]:
    """Return dotted key -> a text with the origin of a value that has no default.

    For base.yaml the text includes the value; for keys that only chosen files set, it names their folder.
    """
    found = {"nodes": "the model's `defaults.nodes`"}
    for folder in ("sites", "hardware", "nodes", "recipes", "models"):
        for path in sorted((config_dir / folder).glob("*.yaml")):
            found |= {key: f"set in `{folder}/`" for key, _ in _leaves(path)}
    for line in read_yaml(config_dir / PRESETS).values():
        found |= {f"algorithm.{key}": f"set in `{PRESETS}`" for key in line}
    return found | {key: f"`{_spell(value)}` in `base.yaml`" for key, value in _leaves(config_dir / "base.yaml")}


def _leaves(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a YAML file."""
    stack = [("", read_yaml(path))]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{key}.{name!s}" if key else str(name), child) for name, child in value.items()]
        else:
            yield key, value


def _section(name: str, section: type, set_in: Mapping[str, str]) -> str:
    rows = entries(name, section, set_in)
    if not rows:
        return f"## {name}\n\n{_summary(section)}\n" if name else ""
    heading = f"## {name}\n\n{_summary(section)}" if name else "## (top level)"
    table = [f"| `{row.key}` | {row.doc} | {row.kind} | {row.default} | {row.allowed} |" for row in rows]
    return "\n".join([heading, "", "| key | meaning | type | default | allowed |", "|---|---|---|---|---|", *table, ""])


def _summary(section: type) -> str:
    return (section.__doc__ or "").split("\n\n")[0].strip()


def _default(field: dataclasses.Field[Any], origin: str) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value == "???":
        return origin or "has to be set"
    return f"`{_spell(value)}`"


def _allowed(metadata: Mapping[str, Any]) -> str:
    if "choices" in metadata:
        return ", ".join(f"`{choice}`" for choice in metadata["choices"])
    words = {"minimum": "≥", "exclusive_minimum": ">", "maximum": "≤"}
    return ", ".join(f"{sign} {metadata[name]}" for name, sign in words.items() if name in metadata)


def _choice_row(config_dir: Path, key: str, folder: str) -> str:
    names = sorted(path.stem for path in (config_dir / folder).glob("*.yaml"))
    return f"| `{key}` | {', '.join(f'`{folder}/{name}.yaml`' for name in names)} |"


def _spell(value: Any) -> str:
    return json.dumps(value)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a file in `config/`, or of a `--configfile`, for editors.

    No key is required, because a file is only a layer. Rules between keys are not part of the schema.
    """
    found = section_schema(schema.Config)
    for key in CHOSEN:
        found["properties"][key] = {"anyOf": [{"type": "string"}, found["properties"][key]]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "posttrain", **found} | {
        "properties": {**REQUEST_SCHEMA, **found["properties"]}
    }


def section_schema(section: type) -> dict[str, Any]:
    """Return the JSON schema of a section and its subsections."""
    return {
        "type": "object",
        "description": _summary(section),
        "additionalProperties": False,
        "properties": {name: _value_schema(kind, metadata) for name, kind, metadata in members(section)},
    }


def _value_schema(kind: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        return section_schema(typing.cast(type, kind))
    described = {"description": metadata["doc"]}
    if row := row_of(kind):
        return {"type": "object", **described, "additionalProperties": section_schema(row)}
    limits = {JSON_LIMITS[limit]: value for limit, value in metadata.items() if limit in JSON_LIMITS}
    return {**described, **JSON_TYPES[kind], **limits}


def main() -> None:
    """Print the README of a folder, or the JSON schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("config"))
    parser.add_argument("--schema", action="store_true")
    arguments = parser.parse_args()
    text = json.dumps(json_schema(), indent=1) + "\n" if arguments.schema else render_readme(arguments.folder)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

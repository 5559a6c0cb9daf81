"""Types and ranges of single configuration values, and the problems of wrong ones."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import ValidationError

from posttrain.config import schema
from posttrain.config.key_aliases import key_of
from posttrain.errors import Problem

TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list[str]: "a list of text",
}
# Placeholder for a row name of a table in dotted keys.
ANY_NAME = "*"
_NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, str: StringNode, bool: BooleanNode}


@lru_cache
def leaf_types(section: type) -> dict[str, Any]:
    """Return dotted key -> type of every value of a section; cached, so do not modify it."""
    return {key: kind for key, kind, _ in fields_of(section)}


@lru_cache
def fields_of(section: type, prefix: str = "") -> tuple[tuple[str, Any, Mapping[str, Any]], ...]:
    """Return (dotted key, type, limits) of every value of a section; `ANY_NAME` is the name of a table's row."""
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    for name, kind, metadata in members(section):
        if dataclasses.is_dataclass(kind):
            found += fields_of(typing.cast(type, kind), f"{prefix}{name}.")
        elif row := row_of(kind):
            found += fields_of(row, f"{prefix}{name}.{ANY_NAME}.")
        else:
            found.append((f"{prefix}{name}", kind, metadata))
    return tuple(found)


def build(section: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a section as its dataclass.

    Args:
        section: The dataclass.
        values: Dotted key -> value of the right type, for every value of the section.
        prefix: Prefix of the section's keys.
    """
    own: dict[str, Any] = {}
    for name, kind, _ in members(section):
        if dataclasses.is_dataclass(kind):
            own[name] = build(typing.cast(type, kind), values, f"{prefix}{name}.")
        elif row := row_of(kind):
            table = f"{prefix}{name}."
            own[name] = {key: build(row, values, f"{table}{key}.") for key in row_names(values, table)}
        else:
            value = values[f"{prefix}{name}"]
            own[name] = list(value) if isinstance(value, list) else value
    return section(**own)


def row_of(kind: Any) -> type | None:
    """Return the section class of a table's rows; None if `kind` is no table, a mapping of names to sections."""
    arguments = typing.get_args(kind) if typing.get_origin(kind) is dict else ()
    return typing.cast(type, arguments[1]) if arguments and dataclasses.is_dataclass(arguments[1]) else None


def row_names(keys: Iterable[str], table: str) -> list[str]:
    """Return the names of a table's rows in the order of the dotted `keys`; `table` ends with a dot."""
    return list(dict.fromkeys(key[len(table) :].partition(".")[0] for key in keys if key.startswith(table)))


def general_key(key: str) -> str:
    """Return a dotted key with `ANY_NAME` for the name of a table's row.

    Example:
        "data.sources.gsm8k.weight" -> "data.sources.*.weight"
    """
    for table in tables():
        if key.startswith(table):
            _, dot, rest = key[len(table) :].partition(".")
            return f"{table}{ANY_NAME}{dot}{rest}"
    return key


@lru_cache
def tables() -> Mapping[str, type]:
    """Return key prefix -> row class of each table."""
    return dict(_tables(schema.Config, ""))


def _tables(section: type, prefix: str) -> Iterator[tuple[str, type]]:
    for name, kind, _ in members(section):
        if dataclasses.is_dataclass(kind):
            yield from _tables(typing.cast(type, kind), f"{prefix}{name}.")
        elif row := row_of(kind):
            yield f"{prefix}{name}.", row


@lru_cache
def members(section: type) -> tuple[tuple[str, Any, Mapping[str, Any]], ...]:
    """Return (name, type, limits) of a section's own fields; cached, because resolving types is slow."""
    hints = typing.get_type_hints(section)
    return tuple((field.name, hints[field.name], field.metadata) for field in dataclasses.fields(section))


def typed(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, by OmegaConf's rules of conversion (the text "1e-6" is a number).

    Raises:
        ValidationError: The value cannot be converted, or YAML read a text as a number, boolean or date.
    """
    if kind == list[str]:
        items = value if isinstance(value, list) else [value]
        return [str(item) if _is_whole(item) else typed(item, str) for item in items]
    if is_misread_text(value, kind):
        raise ValidationError(f"{value!r} is no text")
    if kind is bool and isinstance(value, int) and value not in (0, 1):
        raise ValidationError(f"{value} is neither true nor false")
    return _NODES[kind](value=value, is_optional=False)._value()


def is_misread_text(value: Any, kind: Any) -> bool:
    """Return whether YAML misread a text, so that the original is lost (`0123` is read as 83)."""
    if kind == list[str]:
        items = value if isinstance(value, list) else [value]
        return any(is_misread_text(item, str) and not _is_whole(item) for item in items)
    return kind is str and isinstance(value, int | float | datetime.date)


def _is_whole(item: Any) -> bool:
    """Return whether an item of a list is a whole number, such as a concurrency; YAML is read without octal numbers."""
    return isinstance(item, int) and not isinstance(item, bool)


def check_ranges(values: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of every value outside the range or choices of its field.

    Args:
        values: Dotted key -> value.
    """
    problems: list[Problem] = []
    of_rows = [key for key in values if key not in leaf_types(schema.Config)]
    for general, _, limits in fields_of(schema.Config):
        keys = [key for key in of_rows if general_key(key) == general] if ANY_NAME in general else [general]
        for key in keys:
            if key in values and (allowed := _violated(values[key], limits)) is not None:
                remedy = did_you_mean(str(values[key]), limits.get("choices", ())) or f"choose {allowed}"
                problems.append(Problem("out-of-range", key, repr(values[key]), allowed, remedy))
    return problems


def _violated(value: Any, limits: Mapping[str, Any]) -> str | None:
    """Return the allowed values as text, if `value` violates one of a field's limits."""
    if "choices" in limits and value not in limits["choices"]:
        return "one of " + ", ".join(map(str, limits["choices"]))
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    low, above, high = (limits.get(name) for name in ("minimum", "exclusive_minimum", "maximum"))
    broken = (
        (low is not None and value < low)
        or (above is not None and value <= above)
        or (high is not None and value > high)
    )
    if not broken:
        return None
    bounds = [f"at least {low}"] if low is not None else []
    bounds += [f"more than {above}"] if above is not None else []
    bounds += [f"at most {high}"] if high is not None else []
    return " and ".join(bounds)


def unknown_key(key: str, value: Any, origin: str, types: Mapping[str, Any]) -> Problem:
    """Return the problem of an unknown key, with the nearest known one."""
    for table in tables():
        # The user chooses the names of the table's rows.
        name = key[len(table) :].partition(".")[0] if key.startswith(table) else ""
        types = {known.replace(f"{table}{ANY_NAME}", f"{table}{name or 'NAME'}"): kind for known, kind in types.items()}
    parent = key.rpartition(".")[0]
    siblings = [known for known in types if known.rpartition(".")[0] == parent]
    other = key_of(key)
    remedy = (f"did you mean {other!r}?" if other in types else did_you_mean(key, types)) or (
        "allowed here: " + ", ".join(sorted(k.rpartition(".")[2] for k in siblings))
        if siblings
        else "see config/README.md"
    )
    return Problem("unknown-key", key, f"{value!r} ({origin})", "a known key", remedy)


def did_you_mean(word: str, known: Any) -> str | None:
    """Return a suggestion, or None if no known name is similar."""
    # Two swapped letters of four ("tyni") make a ratio of 0.5.
    matches = difflib.get_close_matches(word, list(map(str, known)), n=1, cutoff=0.5)
    return f"did you mean {matches[0]!r}?" if matches else None


def leaves_of(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Return dotted key -> value of a nested mapping."""
    return {dotted: value for _, _, dotted, value in walk(tree) if not isinstance(value, dict)}


def walk(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[int, str, str, Any]]:
    """Yield (depth, key, dotted key, value) of a nested mapping, parents first."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        yield depth, str(key), dotted, value
        if isinstance(value, dict):
            yield from walk(value, f"{dotted}.", depth + 1)


@lru_cache
def defaults_of(section: type) -> dict[str, Any]:
    """Return dotted key -> default of every leaf, "???" if it has none; cached, so do not modify it."""
    plain = OmegaConf.to_container(OmegaConf.structured(section))
    assert isinstance(plain, dict)
    return leaves_of(plain)


def all_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> default, including the rows of tables that `values` contains."""
    found = dict(defaults_of(schema.Config))
    for table, row in tables().items():
        for name in row_names(values, table):
            found |= {f"{table}{name}.{key}": value for key, value in defaults_of(row).items()}
    return found

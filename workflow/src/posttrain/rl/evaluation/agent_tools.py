"""Finds, by their JSON schemas, the functions with which an agent can write and read files or run programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rl.environments.protocol import Start

# What a text parameter is for -> its usual names.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "path": ("path", "file_path", "filepath", "filename", "file_name", "file"),
    "content": ("content", "contents", "file_text", "text", "data"),
    "command": ("command", "cmd", "shell_command", "bash"),
    "code": ("code", "source", "program", "script", "python"),
    "answer": ("answer", "final_answer", "solution", "response"),
}
# Parameters of any type with which an agent may state how well it did.
CLAIMS = ("reward", "score", "grade", "success", "passed")
WRITING, READING = ("write", "create", "save"), ("read", "view", "open", "cat", "show", "load", "get")
_ONES: Mapping[str, Any] = {"number": 1.0, "integer": 1, "boolean": True}
_EMPTY: Mapping[str, Any] = {"number": 0.0, "integer": 0, "boolean": False, "array": [], "object": {}}


def calls_with(start: Start, given: Mapping[str, str], doing: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a call of each function that has text parameters for some values.

    Args:
        start: Has the functions.
        given: Key of `PARAMETERS` -> value.
        doing: Words of which one starts the value that is chosen from an enumeration.
    """
    found = []
    for name, properties, required in _functions(start):
        names = {kind: next((one for one in PARAMETERS[kind] if _is_text(properties.get(one))), "") for kind in given}
        if all(names.values()):
            found.append(_call(name, {names[kind]: given[kind] for kind in given}, properties, required, doing))
    return found


def reading_calls(start: Start, path: str) -> list[dict[str, Any]]:
    """Return a call of each function that reads the file of a path, judged by its name or an enumeration of actions."""
    found = []
    for call in calls_with(start, {"path": path}, READING):
        texts = [
            call["name"],
            *(str(value) for key, value in call["arguments"].items() if key not in PARAMETERS["path"]),
        ]
        writes = any(name in call["arguments"] for name in PARAMETERS["content"])
        found += [call] if not writes and any(word in text for word in READING for text in texts) else []
    return found


def claiming_calls(start: Start) -> list[dict[str, Any]]:
    """Return a call of each function that takes a reward, which it claims in full."""
    found = []
    for name, properties, required in _functions(start):
        claims = {one: _ONES.get(_type_of(properties[one]), "1") for one in CLAIMS if one in properties}
        found += [_call(name, claims, properties, required, ())] if claims else []
    return found


def calls_without_arguments(start: Start, only_complete: bool = False) -> list[dict[str, Any]]:
    """Return a call of each function without arguments.

    Args:
        start: Has the functions.
        only_complete: Leave out functions that require some.
    """
    return [
        {"name": name, "arguments": {}} for name, _, required in _functions(start) if not (only_complete and required)
    ]


def _functions(start: Start) -> list[tuple[str, Mapping[str, Any], Sequence[str]]]:
    """Return name, properties and required parameters of each function; environments may give any JSON as schema."""
    found: list[tuple[str, Mapping[str, Any], Sequence[str]]] = []
    for tool in start.tools or ():
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            given = function.get("parameters")
            schema = given if isinstance(given, dict) else {}
            properties, required = schema.get("properties"), schema.get("required")
            names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            found.append((function["name"], properties if isinstance(properties, dict) else {}, names))
    return found


def _call(
    name: str,
    arguments: Mapping[str, Any],
    properties: Mapping[str, Any],
    required: Sequence[str],
    doing: Sequence[str],
) -> dict[str, Any]:
    others = {one: _filler(properties.get(one), doing) for one in required if one not in arguments}
    return {"name": name, "arguments": {**arguments, **others}}


def _filler(schema: Any, doing: Sequence[str]) -> Any:
    """Return a value for a required parameter that nothing is known of."""
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices:
        return next((one for one in choices if str(one).startswith(tuple(doing))), choices[0])
    return _EMPTY.get(_type_of(schema), "")


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict) or "enum" in schema:
        return False
    options = schema.get("anyOf")
    return any(map(_is_text, options)) if isinstance(options, list) else _type_of(schema) in ("", "string")


def _type_of(schema: Any) -> str:
    """Return the type in a schema, the first of several; "" if it names none."""
    kind = schema.get("type") if isinstance(schema, dict) else ""
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return kind if isinstance(kind, str) else ""

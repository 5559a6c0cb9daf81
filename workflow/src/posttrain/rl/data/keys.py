"""Paths into a row: `answer`, `reward_model.ground_truth`, `extra_info["a.b"]`, `turns[:-1]`, `turns[-1].content`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import ConfigError, Problem

# A name (preceded by a dot unless first); a list index, from the end if negative; a slice; a quoted name.
_PART = re.compile(
    r"""(?:^|(?!^)\.)(?P<name>[^.\[\]"\s]+)|\[(?P<place>-?\d+)\]|\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]"""
    r"""|\[(?P<quote>["'])(?P<quoted>.+?)(?P=quote)\]"""
)
MAX_NAMES_TOLD = 8

Part = str | int | tuple[int | None, int | None]


class AbsentError(LookupError):
    """A row has no value at a key; the text names the missing part and the available ones."""


@dataclass(frozen=True)
class Key:
    """The path of a value in a row.

    Args:
        text: The user's text.
        parts: Names of columns and fields, list indices, and (start, stop) of slices.
    """

    text: str
    parts: tuple[Part, ...]

    @property
    def column(self) -> str:
        """The column that the key begins with."""
        return str(self.parts[0])

    @property
    def is_column(self) -> bool:
        """Whether the key names a whole column."""
        return len(self.parts) == 1

    def find(self, row: Mapping[str, Any]) -> Any:
        """Return the value of a row.

        Raises:
            AbsentError: The row has no value there, or null.
        """
        if self.text in row:  # a column may be called "a.b"
            return _present(row[self.text], self.text, "")
        value: Any = row
        for place, part in enumerate(self.parts):
            value = _present(_step(value, part, self._told(place), self.text), self.text, self._told(place + 1))
        return value

    def _told(self, num_parts: int) -> str:
        """Return a prefix of the key for messages; empty for the row and for a key of one part."""
        if num_parts == 0 or self.is_column:
            return ""
        first, *others = map(_written, self.parts[:num_parts])
        return first.removeprefix(".") + "".join(others)


def parse_key(text: str, setting: str = "data.label_key") -> Key:
    """Parse a key.

    Args:
        text: Names separated by dots, list indices in brackets.
        setting: The setting that gives it, for messages.

    Raises:
        ConfigError: The text is not a valid path.

    Example:
        `messages[-1].content` has the parts "messages", -1, "content"; `messages[:-1]` "messages" and (None, -1).
    """
    parts: list[Part] = []
    end = 0
    while end < len(text) and (found := _PART.match(text, end)):
        end = found.end()
        parts.append(_read_part(found))
    if end < len(text) or not parts or not isinstance(parts[0], str):
        allowed = (
            "a path such as answer, reward_model.ground_truth, messages[:-1] (all but the last), messages[-1].content "
            'or extra_info["a.b"]'
        )
        raise ConfigError(
            [Problem("not-a-path-of-keys", setting, repr(text), allowed, f"correct it from character {end + 1} on")]
        )
    return Key(text, tuple(parts))


def _read_part(found: re.Match[str]) -> Part:
    if name := found["name"] or found["quoted"]:
        return name
    if found["place"]:
        return int(found["place"])
    start, stop = (int(found[end]) if found[end] else None for end in ("start", "stop"))
    return start, stop


def _written(part: Part) -> str:
    if isinstance(part, tuple):
        return "[{}:{}]".format(*("" if end is None else end for end in part))
    return f"[{part}]" if isinstance(part, int) else f".{part}"


def _step(value: Any, part: Part, told: str, whole: str) -> Any:
    if not isinstance(part, str):
        if not isinstance(value, list):
            raise AbsentError(f"{whole!r} is missing: {told!r} is {kind_of(value)}, not a list")
        if isinstance(part, tuple):
            return value[slice(*part)]
        if not -len(value) <= part < len(value):
            raise AbsentError(f"{whole!r} is missing: {told!r} has {len(value)} elements")
        return value[part]
    if not isinstance(value, Mapping):
        raise AbsentError(f"{whole!r} is missing: {told!r} is {kind_of(value)}, not an object")
    if part not in value:
        raise AbsentError(f"{whole!r} is missing{_what_is_there(part, list(value), told)}")
    return value[part]


def _present(value: Any, whole: str, told: str) -> Any:
    if value is None:
        raise AbsentError(f"{whole!r} is missing" + (f": {told!r} is null" if told not in ("", whole) else ""))
    return value


def _what_is_there(part: str, names: list[str], told: str) -> str:
    near = difflib.get_close_matches(part, names, n=1)
    if near:
        return f" (did you mean {f'{told}.' if told else ''}{near[0]}?)"
    if not told:
        return ""
    return f": {told!r} has {', '.join(names[:MAX_NAMES_TOLD]) or 'nothing'}"


def kind_of(value: Any) -> str:
    """Return the type name of a JSON value for messages."""
    return "null" if value is None else f"a {type(value).__name__}"

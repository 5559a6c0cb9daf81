"""The only reader of users' YAML: nothing is dropped, misread or expanded without bound.

PyYAML keeps the last of duplicate keys, reads `0100` as 64 and `1:30` as 90, and expands nested aliases. Such files are
rejected here, with line numbers, on the stream of parsing events, before anything is constructed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, MappingStartEvent, ScalarEvent
from yaml.nodes import MappingNode, ScalarNode
from yaml.resolver import Resolver

from posttrain.errors import ConfigError, Problem, raise_if_any

# The project's largest file has 4 KB, 4 levels and 150 values.
MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 10_000
_ALLOWED = "a YAML file of keys and values"
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = Resolver()
_TEXT_TAG, _INT_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
# The merge key and, in YAML 1.1, the default value.
_KEY_TAGS = (_TEXT_TAG, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
# Octal and base-60 numbers: nobody means 64 by `0100`, or 90 by `1:30`.
_OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|.*:.*")


def read_mapping(path: Path, name: str = "", load: Callable[[str], Any] = yaml.safe_load) -> dict[Any, Any]:
    """Return the keys and values of a YAML or JSON file, which may be empty.

    Args:
        path: The file.
        name: Its name in problems; defaults to its path.
        load: Constructs the values of a checked text.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, is too large, or has duplicate keys (with their lines).
    """
    name = name or str(path)
    try:
        text = _read(path)
        raise_if_any([Problem("not-strict-yaml", name, *fault) for fault in faults_of(text)])
        top = yaml.compose(text, Loader=_PARSER)
        content = load(text) if isinstance(top, MappingNode) else yaml.safe_load(text)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        reason = " ".join(filter(None, [error.context, error.problem]))
        raise ConfigError([Problem("not-yaml", name, f"{line}{reason}", _ALLOWED, "correct that line")]) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            [Problem("file-unreadable", name, str(error), _ALLOWED, "correct the path or the file")]
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        remedy = "write `section: {key: value}`"
        raise ConfigError(
            [Problem("not-a-mapping", name, f"a {type(content).__name__} at its top level", _ALLOWED, remedy)]
        )
    return content


def faults_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the faults of a YAML text as (value, allowed, remedy); stops at the first exceeded limit.

    Raises:
        yaml.YAMLError: The text cannot be parsed.
    """
    scan = _Scan()
    for event in yaml.parse(text, Loader=_PARSER):
        yield from scan.take(event)
        if scan.num_values > MAX_VALUES or len(scan.open) > MAX_DEPTH:
            found = f"line {event.start_mark.line + 1}: more than {MAX_VALUES} values or {MAX_DEPTH} levels"
            yield (
                found,
                f"{MAX_VALUES} values, with each alias counted in full",
                "write out what is needed, without aliases",
            )
            return


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    text = content.decode()
    # JSON may be indented by tabs, which its strings cannot contain.
    return text.replace("\t", " ") if text.lstrip().startswith("{") else text


@dataclasses.dataclass
class _Collection:
    """A mapping or sequence whose end was not read yet.

    Args:
        anchor: Its anchor, if it has one.
        first: Number of values before it.
        keys: Key -> its line; None for a sequence.
        key: The key whose value comes next; None if a key comes next.
    """

    anchor: str | None
    first: int
    keys: dict[str, int] | None
    key: str | None = None


class _Scan:
    """Counts values, with aliases expanded, and finds duplicate keys."""

    def __init__(self) -> None:
        self.num_values = 0
        self.open: list[_Collection] = []
        self._sizes: dict[str, int] = {}

    def take(self, event: Event) -> Iterator[tuple[str, str, str]]:
        """Process the next event and yield its faults."""
        if isinstance(event, CollectionEndEvent):
            closed = self.open.pop()
            if closed.anchor:
                self._sizes[closed.anchor] = self.num_values - closed.first
            return
        if not isinstance(event, ScalarEvent | AliasEvent | CollectionStartEvent):
            return
        yield from self._place(event)
        if isinstance(event, CollectionStartEvent):
            keys: dict[str, int] | None = {} if isinstance(event, MappingStartEvent) else None
            self.open.append(_Collection(event.anchor, self.num_values, keys))
        elif isinstance(event, AliasEvent):
            if event.anchor in (parent.anchor for parent in self.open):
                yield f"line {_line(event)}: *{event.anchor} inside of itself", "values that end", "write it out"
            self.num_values += self._sizes.get(event.anchor, 0)  # 0 for a scalar
        self.num_values += 1

    def _place(self, event: Event) -> Iterator[tuple[str, str, str]]:
        """Process an event as a key or a value of its collection."""
        parent, line = self.open[-1] if self.open else None, _line(event)
        if parent is None or parent.keys is None or parent.key is not None:
            if parent is not None:
                parent.key = None
            if isinstance(event, ScalarEvent) and _tag(event) == _INT_TAG and _OTHER_BASE.fullmatch(event.value):
                read = yaml.safe_load(event.value)
                found = f"line {line}: {event.value}, which YAML reads as {read}"
                yield found, "a decimal number, or text in quotes", f'write {read}, or "{event.value}"'
            return
        if not isinstance(event, ScalarEvent):
            parent.key = ""
            yield f"line {line}: a key that is no single word", "keys that are text", "give it a name"
            return
        parent.key = event.value
        if _tag(event) not in _KEY_TAGS:
            found = f"line {line}: the key {event.value}, which YAML does not read as text"
            yield found, "keys that are text", f'write it in quotes: "{event.value}"'
        elif event.value in parent.keys:
            found = f"line {line}: {event.value!r} for the second time; the first is on line {parent.keys[event.value]}"
            yield found, "each key once", "join the two, or delete one"
        parent.keys.setdefault(event.value, line)


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1


def _tag(event: ScalarEvent) -> str:
    return event.tag or str(_RESOLVER.resolve(ScalarNode, event.value, event.implicit))

"""Compares the planner's flags for Megatron and SGLang with a script's."""

from __future__ import annotations

from typing import Any

from posttrain.config.schema import Config
from posttrain.plan.flags.megatron_flags import megatron_flags
from posttrain.plan.flags.sglang_flags import engine_flags
from posttrain_import.expression import literal
from posttrain_import.row import Row
from posttrain_import.script import Given

_WORDS = {"true": True, "false": False, "none": None, "": True}


def emitted(config: Config) -> dict[str, list[Any]]:
    """Return setting -> its values; prefill and decode engines may have different ones."""
    found: dict[str, list[Any]] = {}
    for flags in (megatron_flags(config) | engine_flags(config)).values():
        for item in flags:
            found.setdefault(item.name, []).append(item.value)
    return found


def as_plain(value: Any) -> Any:
    """Normalize a value for comparison: "0.70" is 0.7, case is ignored, "" is an enabled switch."""
    if not isinstance(value, str):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    number = literal(value)
    return value.lower() if number is None else number


def disagreement(row: Row, given: Given, settings: dict[str, list[Any]]) -> str:
    """Return how the planner's setting differs from a script's flag; "" if it does not.

    Args:
        row: Row of the table.
        given: A flag of the row.
        settings: From `emitted`.
    """
    name = row.setting_of(given.name)
    if not name:
        return ""
    theirs = as_plain(" ".join(given.values))
    theirs = next((new for old, new in row.renamed.items() if old == theirs), theirs)
    ours = [as_plain(value) for value in settings.get(name, [None])]
    is_off = theirs in (False, None, 0)
    if any(value == theirs or (is_off and value in (False, None, 0)) for value in ours):
        return ""
    spelled = ", ".join(dict.fromkeys(map(str, ours)))
    return f"{name} is {spelled} here" + (f": {row.note}" if row.note else "")

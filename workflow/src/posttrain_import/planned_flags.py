"""The planner's tables of flags beside a script's: whether Megatron and SGLang are told the same."""

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
    """Return setting -> its values; engines that prefill and engines that decode may have different ones."""
    found: dict[str, list[Any]] = {}
    for flags in (megatron_flags(config) | engine_flags(config)).values():
        for item in flags:
            found.setdefault(item.name, []).append(item.value)
    return found


def as_plain(value: Any) -> Any:
    """Return a value as it is compared: "0.70" is 0.7, "RMSNorm" any spelling, "" a switch that is on."""
    if not isinstance(value, str):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    number = literal(value)
    return value.lower() if number is None else number


def disagreement(row: Row, given: Given, settings: dict[str, list[Any]]) -> str:
    """Return how a setting of the planner differs from what a script gives; "" where it does not.

    Args:
        row: Of the table.
        given: One of its flags.
        settings: What `emitted` has found.
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

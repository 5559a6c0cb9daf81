"""One setting of an external program, and conversions to a command line, keyword arguments or an environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONSTANT = "constant"


@dataclass(frozen=True)
class Flag:
    """One setting of an external program.

    Args:
        name: The program's spelling: "--tp-size", "num_layers", "OMP_NUM_THREADS".
        value: Plain data; True is a switch without a value.
        keys: Keys of our configuration that determine the value; empty for a constant.
        reason: The reason, if the keys do not explain it.
    """

    name: str
    value: Any
    keys: tuple[str, ...] = ()
    reason: str = ""

    def as_dict(self, origins: Mapping[str, str]) -> dict[str, Any]:
        """Return the flag's entry in `plan.json`.

        Args:
            origins: Dotted key -> the layer that set it.
        """
        layers = dict.fromkeys(origins.get(key, "schema default") for key in self.keys)
        origin = ", ".join(layers) or CONSTANT
        return {"value": self.value, "origin": origin, "keys": list(self.keys), "reason": self.reason}


def flag(name: str, value: Any, *keys: str, reason: str = "") -> Flag:
    """Return a flag; a constant, which has no keys, requires a reason."""
    assert keys or reason, f"{name} has neither a key nor a reason"
    return Flag(name, value, keys, reason)


def as_mapping(flags: Iterable[Flag]) -> dict[str, Any]:
    """Return name -> value."""
    return {item.name: item.value for item in flags}


def as_arguments(flags: Iterable[Flag]) -> tuple[str, ...]:
    """Return the flags as words of a command line.

    Example:
        `--tp-size` 8 and the switch `--sleep-on-idle` give ("--tp-size", "8", "--sleep-on-idle").
    """
    words: list[str] = []
    for item in flags:
        words += [item.name] if item.value is True else [item.name, str(item.value)]
    return tuple(words)


def as_environment(flags: Iterable[Flag]) -> dict[str, str]:
    """Return the flags as environment variables."""
    return {item.name: str(item.value) for item in flags}

"""A row of the table in docs/coming-from.md: flags of slime and miles, flags of our programs, and our keys.

The page is printed from the rows; `posttrain import-flags` uses them to convert scripts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Flags of a script: name -> values.
Values = Mapping[str, tuple[str, ...]]
# (values of a flag, all flags) -> values of our keys.
Convert = Callable[[tuple[str, ...], Values], Mapping[str, Any]]


class NotHere(ValueError):
    """A flag's value has no equivalent among our keys; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class Row:
    """Flags that are converted together.

    Args:
        theirs: Flags with the recipes' values: "--lr 1e-6"; also environment variables.
        keys: Our keys. Without `convert`, the nth flag sets the nth key.
        here: Names of the settings in `megatron_flags` and `sglang_flags`, per flag; "" if there is none.
        note: Further explanation: why it is ignored, or done differently.
        convert: Converts the first flag's values, if they differ from the keys'.
        not_here: Why none of the flags can be taken over.
        only: Values that may be ignored if there is no key; empty: any.
        absent: Both projects' behaviour without the first flag; None: its absence has no meaning.
        renamed: Their value -> ours in `here`.
        late: Set the key only if the value that follows from all others differs from the script.
        told: The page's second column, if it differs from `here`.
    """

    theirs: tuple[str, ...]
    keys: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    note: str = ""
    convert: Convert | None = None
    not_here: str = ""
    only: tuple[str, ...] = ()
    absent: str | None = None
    renamed: Mapping[Any, Any] = field(default_factory=dict)
    late: bool = False
    told: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the flags."""
        return tuple(re.split("[ =]", flag)[0] for flag in self.theirs)

    def key_of(self, name: str) -> str:
        """Return the key that gets a flag's value unchanged; "" if there is none."""
        place = self.names.index(name)
        return self.keys[place] if self.convert is None and place < len(self.keys) else ""

    def setting_of(self, name: str) -> str:
        """Return the planner's name of a flag's setting; "" if there is none."""
        place = self.names.index(name)
        return self.here[place] if place < len(self.here) else ""


def row(theirs: str, keys: str = "", here: str = "", note: str = "", **more: Any) -> Row:
    """Return a row; lists are separated by spaces, and "-" means none."""
    is_flags = theirs.startswith("--")
    flags = re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", theirs) if is_flags else theirs.split()
    settings = tuple("" if word == "-" else word for word in here.split())
    return Row(tuple(flags), tuple(keys.split()), settings, note, **more)


def cells(item: Row) -> tuple[str, str, str]:
    """Return the page's three cells: their flags, their effect here, our keys."""
    settings = ", ".join(f"`{name}`" for name in dict.fromkeys(item.here) if name)
    here = "; ".join(part for part in (item.told or settings, item.note) if part)
    return ", ".join(f"`{flag}`" for flag in item.theirs), here, ", ".join(f"`{key}`" for key in item.keys)

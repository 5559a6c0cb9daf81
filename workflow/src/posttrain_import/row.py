"""One row of the table behind docs/coming-from.md: flags of slime and miles, our programs' flags, and our keys.

The page is printed from the rows, and `posttrain import-flags` goes through them in the other direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Flags of a script: name -> what follows it.
Values = Mapping[str, tuple[str, ...]]
# What a flag's values, beside those of the other flags, mean in our keys.
Convert = Callable[[tuple[str, ...], Values], Mapping[str, Any]]


class NotHere(ValueError):
    """A flag whose value has no equal among our keys; the text says why."""


@dataclass(frozen=True, eq=False)
class Row:
    """Flags that belong together.

    Args:
        theirs: Each with the value of the recipes, where it takes one: "--lr 1e-6"; variables of the environment, too.
        keys: Our keys. Without `convert`, the first flag's value is the first key's, and so on.
        here: What `megatron_flags` and `sglang_flags` call the setting, flag by flag; "" where they have none.
        note: What else there is to know: why it is left out, or done otherwise.
        convert: What the first flag's values mean, where they are not the keys' as they are.
        not_here: Why none of the flags can be taken over.
        only: Values that leave nothing out where there is no key; empty: any.
        absent: What both projects do without the first flag; None: not told by the flag's absence.
        renamed: Their value -> ours in `here`.
        late: The key is set only where what follows from all others differs from the script.
        told: The page's second column, where `here` is not what it says.
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
        """The flags without their values."""
        return tuple(re.split("[ =]", flag)[0] for flag in self.theirs)

    def key_of(self, name: str) -> str:
        """Return the key that a flag's value is taken over to as it is; "" where there is none."""
        place = self.names.index(name)
        return self.keys[place] if self.convert is None and place < len(self.keys) else ""

    def setting_of(self, name: str) -> str:
        """Return what the planner calls a flag's setting; "" where it has none."""
        place = self.names.index(name)
        return self.here[place] if place < len(self.here) else ""


def row(theirs: str, keys: str = "", here: str = "", note: str = "", **more: Any) -> Row:
    """Return a row; lists are words with spaces between them, and "-" stands for none."""
    is_flags = theirs.startswith("--")
    flags = re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", theirs) if is_flags else theirs.split()
    settings = tuple("" if word == "-" else word for word in here.split())
    return Row(tuple(flags), tuple(keys.split()), settings, note, **more)


def cells(item: Row) -> tuple[str, str, str]:
    """Return the three cells of the page: their flags, what becomes of them here, our keys."""
    settings = ", ".join(f"`{name}`" for name in dict.fromkeys(item.here) if name)
    here = "; ".join(part for part in (item.told or settings, item.note) if part)
    return ", ".join(f"`{flag}`" for flag in item.theirs), here, ", ".join(f"`{key}`" for key in item.keys)

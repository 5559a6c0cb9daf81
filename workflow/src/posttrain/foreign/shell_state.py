"""What is known while a bash script is read: variables, options, and the join of two branches.

A value is a `Word`: its text, or the reason why it is not known. Of two branches of which either may be taken, a
variable keeps the value that both have and is unknown otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.foreign.script import FLAG, UNSET, Word

# Variables that bash or the environment sets: a default says nothing about them.
_AMBIENT = {
    *("HOME", "PATH", "USER", "LOGNAME", "PWD", "OLDPWD", "SHELL", "HOSTNAME", "LANG", "TERM", "TMPDIR", "RANDOM"),
    *("SRANDOM", "SECONDS", "LINENO", "PPID", "UID", "EUID", "GROUPS", "FUNCNAME", "PIPESTATUS", "REPLY", "OPTARG"),
    *("OPTIND", "OSTYPE", "HOSTTYPE", "MACHTYPE", "SHLVL", "SHELLOPTS", "IFS", "DIRSTACK", "MAPFILE", "EPOCHSECONDS"),
    *("EPOCHREALTIME", "COLUMNS", "LINES", "PS4", "_"),
}


@dataclass(frozen=True)
class Variable:
    """A variable of bash.

    Args:
        items: Its values by index or key; a scalar has index 0, one that is unset has none.
        is_array: Whether it is an array.
        attributes: Letters of `declare`.
        why: Why neither its items nor their number are known.
    """

    items: Mapping[Any, Word] = field(default_factory=dict)
    is_array: bool = False
    attributes: frozenset[str] = frozenset()
    why: str = ""

    @property
    def values(self) -> list[Word]:
        """The items in bash's order."""
        return [self.items[key] for key in sorted(self.items, key=lambda key: (isinstance(key, str), key))]


def unknown(why: str) -> Variable:
    """Return a variable of which nothing is known."""
    return Variable(why=why)


@dataclass
class State:
    """Everything that a statement may change.

    Args:
        variables: By name.
        functions: Name -> its body; None where it is not known.
        positional: `$1` and so on; None where they are not known.
        options: Of `set` and `shopt`.
        status: Of the last command; None where it is not known.
        output: What a command substitution has written; None where it is not known.
        stdin: The lines that `read` gets; None where they are not known.
        lost: Why a variable that has no value here may have any; "" where it is the environment's.
        files: Name -> text of each file that the script has written; None where that is not known.
        locals: For each function that runs, what its local variables hide; None: nothing.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    positional: list[Word] | None = field(default_factory=list)
    options: frozenset[str] = frozenset()
    status: int | None = 0
    output: str | None = ""
    stdin: tuple[str, ...] | None = None
    lost: str = ""
    files: dict[str, str | None] = field(default_factory=dict)
    locals: list[dict[str, Variable | None]] = field(default_factory=list)

    def copy(self) -> State:
        """Return a state that can be changed by itself."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            files=dict(self.files),
            locals=[dict(hidden) for hidden in self.locals],
        )

    def get(self, name: str) -> Variable:
        """Return a variable, following references to others (`declare -n`)."""
        name = self.target(name)
        if name in self.variables:
            return self.variables[name]
        if name in _AMBIENT or name.startswith("BASH"):
            return unknown(f"{name} is known only when the script runs")
        return unknown(self.lost or f"{UNSET} {name}")

    def target(self, name: str) -> str:
        """Return the name that a name refers to."""
        for _ in range(4):
            found = self.variables.get(name)
            if found is None or "n" not in found.attributes or not found.items:
                break
            name = found.items[0].text
        return name

    def is_default(self, name: str) -> bool:
        """Tell whether nothing but the environment could give a variable a value."""
        return self.get(name).why == f"{UNSET} {name}"

    def write(self, text: str | None) -> None:
        """Add to the output."""
        self.output = None if text is None or self.output is None else self.output + text

    def lose(self, why: str) -> None:
        """Know nothing of any variable."""
        self.variables, self.lost, self.positional = {}, why, None
        self.functions = dict.fromkeys(self.functions)
        self.locals = [{name: unknown(why) for name in hidden} for hidden in self.locals]
        self.status = self.output = self.stdin = None


def join(one: State | None, other: State | None, why: str, is_loop: bool = False) -> State | None:
    """Return what holds in both of two states; None is a place that is not reached.

    Args:
        one: A branch.
        other: Another one.
        why: The reason for what differs.
        is_loop: They are rounds of a loop, in which lists grow.
    """
    if one is None or other is None:
        return one or other
    names = one.variables.keys() | other.variables.keys()
    return State(
        {
            name: _join_variables(one.get(name), other.get(name), why, is_loop)
            if one.variables.get(name) != other.variables.get(name)
            else one.variables[name]
            for name in names
        },
        {
            name: one.functions.get(name) if one.functions.get(name) is other.functions.get(name) else None
            for name in one.functions.keys() | other.functions.keys()
        },
        one.positional if one.positional == other.positional else None,
        one.options & other.options | ({"unclear"} if one.options != other.options else set()),
        one.status if one.status == other.status else None,
        one.output if one.output == other.output else None,
        one.stdin if one.stdin == other.stdin else None,
        one.lost or other.lost,
        {
            name: one.files.get(name) if one.files.get(name) == other.files.get(name) else None
            for name in one.files.keys() | other.files.keys()
        },
        [_join_locals(mine, theirs, why) for mine, theirs in zip(one.locals, other.locals, strict=True)],
    )


def _join_variables(one: Variable, other: Variable, why: str, is_loop: bool) -> Variable:
    attributes = one.attributes | other.attributes
    if one.is_array and other.is_array and not is_loop and not (attributes & {"A", "i"} or one.why or other.why):
        mine, theirs = one.values, other.values
        shared = 0
        while shared < min(len(mine), len(theirs)) and mine[shared] == theirs[shared]:
            shared += 1
        # A value after the last shared flag belongs to it in one branch alone.
        while shared and not all(FLAG.match(rest[shared].text) for rest in (mine, theirs) if len(rest) > shared):
            shared -= 1
        rest = [replace(word, why=word.why or why) for word in (*mine[shared:], *theirs[shared:])]
        # Which item has which index is not known any more, and nor is how many there are.
        return Variable(dict(enumerate([*mine[:shared], *rest])), True, attributes | {"?"})
    # What is set in one branch alone may have a value: a default says nothing about it.
    reasons = [side.why for side in (one, other) if side.why and not side.why.startswith(UNSET)]
    return replace(unknown(next(iter(reasons), why)), attributes=attributes)


def _join_locals(
    one: dict[str, Variable | None], other: dict[str, Variable | None], why: str
) -> dict[str, Variable | None]:
    return {
        name: one[name] if name in one and name in other and one[name] == other[name] else unknown(why)
        for name in one.keys() | other.keys()
    }

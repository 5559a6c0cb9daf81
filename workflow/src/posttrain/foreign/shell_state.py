"""What is known while a bash script is read: variables, functions, options, and the join of two branches.

A value is a `Word`: its text, or the reason why it is not known. Of two branches of which either may be taken, a
variable keeps the value that both have and is unknown otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from posttrain.foreign.script import FLAG, UNSET, Word
from posttrain.foreign.shell_tree import Code, Unclear

# Variables that bash or the environment sets: a default says nothing about them.
_AMBIENT = {
    *("HOME", "PATH", "USER", "LOGNAME", "PWD", "OLDPWD", "SHELL", "HOSTNAME", "LANG", "TERM", "TMPDIR", "RANDOM"),
    *("SRANDOM", "SECONDS", "LINENO", "PPID", "UID", "EUID", "GROUPS", "FUNCNAME", "PIPESTATUS", "REPLY", "OPTARG"),
    *("OPTIND", "OSTYPE", "HOSTTYPE", "MACHTYPE", "SHLVL", "SHELLOPTS", "IFS", "DIRSTACK", "MAPFILE", "EPOCHSECONDS"),
    *("EPOCHREALTIME", "COLUMNS", "LINES", "PS4", "_"),
}
# Variables whose value bash changes when it is read or set.
_COMPUTED = {"RANDOM", "SRANDOM", "SECONDS", "LINENO", "UID", "EUID", "GROUPS", "FUNCNAME", "DIRSTACK", "_"}


@dataclass(frozen=True)
class Variable:
    """A variable of bash.

    Args:
        words: Its items; a scalar has one, a variable that is unset has none.
        is_array: Whether it is an array.
        marks: "x": exported. "r": read-only. "open": more or fewer items may be there. "special": declared with an
            attribute that changes its values, so none of them is known.
        why: Why neither its items nor their number are known.
    """

    words: tuple[Word, ...] = ()
    is_array: bool = False
    marks: frozenset[str] = frozenset()
    why: str = ""


@dataclass
class State:
    """Everything that a statement may change.

    Args:
        variables: By name. "@" has the arguments; "2 X" is what X of the second function's locals hides.
        functions: Name -> its body; None where it is not known.
        options: Of `set`; "moved" after `cd`, "unclear" where branches differ.
        status: Of the last command; None where it is not known.
        lost: Why a variable that has no value here may have any; "" where it is the environment's.
    """

    variables: dict[str, Variable] = field(default_factory=lambda: {"@": Variable(is_array=True)})
    functions: dict[str, Code | None] = field(default_factory=dict)
    options: frozenset[str] = frozenset()
    status: int | None = 0
    lost: str = ""

    def copy(self) -> State:
        """Return a state that can be changed by itself."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def get(self, name: str) -> Variable:
        """Return a variable."""
        if name in self.variables:
            return self.variables[name]
        if name in _AMBIENT or name.startswith("BASH"):
            return Variable(why=f"{name} is known only when the script runs")
        return Variable(why=self.lost or f"{UNSET} {name}")

    def is_default(self, name: str) -> bool:
        """Tell whether nothing but the environment could give a variable a value."""
        return self.get(name).why == f"{UNSET} {name}"

    def assign(self, name: str, word: Word, is_more: bool = False) -> None:
        """Set a variable to one word, or add to it."""
        old = self._writable(name)
        first = old.words[0] if old.words else Word("", word.place)
        if name in _COMPUTED or "special" in old.marks or (old.is_array and (old.why or "open" in old.marks)):
            self.forget(name, f"what {name} holds then is not known")
            return
        if is_more:
            reason = word.why or first.why or ("" if self.is_default(name) else old.why)
            if reason:
                self.forget(name, reason)
                return
            word = replace(word, text=first.text + word.text)
        self.variables[name] = Variable((word, *old.words[1:]), old.is_array, old.marks)

    def assign_item(self, name: str, index: int | None, word: Word) -> None:
        """Set one item of an array."""
        old = self._writable(name)
        items = [] if self.is_default(name) else list(old.words)
        is_unknown = (old.why and not self.is_default(name)) or old.marks & {"open", "special"}
        if index is None or is_unknown or not 0 <= index <= len(items):
            self.forget(name, f"{word.place} sets one of its elements")
        else:
            items[index : index + 1] = [word]
            self.variables[name] = replace(old, words=tuple(items), is_array=True, why="")

    def assign_array(self, name: str, words: Sequence[Word], is_more: bool, is_open: bool) -> None:
        """Set an array, or add to it; it is open where not all words need be there."""
        old = self._writable(name)
        if "special" in old.marks or (is_more and old.why and not self.is_default(name)):
            self.forget(name, old.why or f"what {name} holds then is not known")
            return
        kept = old.words if is_more and not old.why else ()
        marks = old.marks if is_more else old.marks - {"open"}
        marks |= {"open"} if is_open or any(word.is_list for word in words) else set()
        self.variables[name] = Variable((*kept, *words), True, marks)

    def _writable(self, name: str) -> Variable:
        old = self.get(name)
        if "r" in old.marks:
            raise Unclear(f"{name} is read-only")
        return old

    def forget(self, name: str, why: str) -> None:
        """Know nothing more of a variable."""
        old = self.get(name)
        self.variables[name] = Variable((), old.is_array, old.marks, why)

    def lose(self, why: str) -> None:
        """Know nothing of any variable."""
        self.variables = {name: Variable(why=why) for name in self.variables if " " in name}
        self.functions = dict.fromkeys(self.functions)
        self.lost, self.status = why, None


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
    functions = one.functions.keys() | other.functions.keys()
    return State(
        {name: _join_variables(one.get(name), other.get(name), why, is_loop) for name in names},
        {
            name: one.functions.get(name) if one.functions.get(name) == other.functions.get(name) else None
            for name in functions
        },
        one.options | other.options | ({"unclear"} if one.options != other.options else set()),
        one.status if one.status == other.status else None,
        one.lost or other.lost,
    )


def _join_variables(one: Variable, other: Variable, why: str, is_loop: bool) -> Variable:
    if one == other:
        return one
    marks = one.marks | other.marks
    if one.is_array and other.is_array and not (is_loop or one.why or other.why):
        mine, theirs = one.words, other.words
        shared = 0
        while shared < min(len(mine), len(theirs)) and mine[shared] == theirs[shared]:
            shared += 1
        # A value after the last shared flag belongs to it in one branch alone.
        while shared and not all(FLAG.match(rest[shared].text) for rest in (mine, theirs) if len(rest) > shared):
            shared -= 1
        rest = [replace(word, why=word.why or why) for word in (*mine[shared:], *theirs[shared:])]
        # Which item has which index is not known any more, and nor is how many there are.
        return Variable((*mine[:shared], *rest), True, marks | {"open"})
    # What is set in one branch alone may have a value: a default says nothing about it.
    reasons = [side.why for side in (one, other) if side.why and not side.why.startswith(UNSET)]
    return Variable((), one.is_array or other.is_array, marks, next(iter(reasons), why))

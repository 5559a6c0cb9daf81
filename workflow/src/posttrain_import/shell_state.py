"""The state of a bash script that is parsed: variables, functions, and the join of branches.

If any of several branches may be taken, a variable keeps a value that all share, and is unknown otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from posttrain_import.script import FLAG, UNSET, Word
from posttrain_import.shell_tree import Code, Misread

# Variables that bash or the environment sets, so neither a default nor an assignment determines their value.
_AMBIENT = {
    *("HOME", "PATH", "USER", "LOGNAME", "PWD", "OLDPWD", "SHELL", "HOSTNAME", "LANG", "TERM", "TMPDIR", "RANDOM"),
    *("SRANDOM", "SECONDS", "LINENO", "PPID", "UID", "EUID", "GROUPS", "FUNCNAME", "PIPESTATUS", "REPLY", "OPTARG"),
    *("OPTIND", "OSTYPE", "HOSTTYPE", "MACHTYPE", "SHLVL", "SHELLOPTS", "IFS", "DIRSTACK", "MAPFILE", "EPOCHSECONDS"),
    *("EPOCHREALTIME", "COLUMNS", "LINES", "PS4", "_", "#", "?", "$", "!", "0", "-"),
}


@dataclass(frozen=True)
class Variable:
    """A variable of bash.

    Args:
        words: Its items; a scalar has one. An item without a text stands for any number of items.
        is_array: Whether it is, or may be, an array.
    """

    words: tuple[Word, ...]
    is_array: bool = False

    def is_unset(self) -> bool:
        """Return whether only the environment could set it."""
        return bool(self.words) and not self.words[0].text and UNSET in self.words[0].why

    def has_flags(self) -> bool:
        """Return whether it may contain a flag."""
        return any(word.is_list or "--" in word.text for word in self.words)


@dataclass
class State:
    """The state that statements change.

    Args:
        variables: Name -> variable; "@" has the arguments.
        functions: Name -> body; None if unknown.
        fixed: Names whose assignments are not interpreted, because of their attributes.
        constants: Read-only names.
        options: Options of `set`, as letters, and pipefail.
        lost: Why a variable without a value here may have any value; "": only the environment may set it.
        is_over: The shell has ended with `status`: True: success, None: unknown.
        written: Names that were set; "": any. Shared by copies.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Code | None] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    lost: str = ""
    is_over: bool = False
    status: bool | None = None
    written: set[str] = field(default_factory=set)

    def copy(self) -> State:
        """Return an independent copy."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def get(self, name: str) -> Variable:
        """Return a variable."""
        if name in _AMBIENT or name.startswith("BASH"):
            return Variable((Word("", "", f"{name} is known only when the script runs"),), True)
        return self.variables.get(name) or Variable((Word("", "", self.lost or f"{UNSET} {name}"),), bool(self.lost))

    def assign(self, name: str, words: Sequence[Word], is_array: bool = False, is_more: bool = False) -> None:
        """Set a variable, or add to it.

        Raises:
            Misread: The variable affects how words are parsed, or is read-only.
        """
        old = self.get(name)
        if name in ("IFS", "POSIXLY_CORRECT", "GLOBIGNORE"):
            raise Misread(f"what {name} changes is not followed")
        if name in self.constants:
            raise Misread(f"{name} is read-only")
        if name in self.fixed:
            self.forget([name], f"what {name} holds then is not known")
            return
        if not (is_array and is_more):
            self.written.add(name)
        kept = () if old.is_unset() else old.words
        if is_array:
            words = [*(kept if is_more else ()), *words]
        elif kept and is_more:
            why = kept[0].why or words[0].why
            may_be_list = bool(why) and (old.has_flags() or Variable(tuple(words)).has_flags())
            words = [Word(f"${name}" if why else kept[0].text + words[0].text, words[0].place, why, may_be_list)]
        if kept and old.is_array and not is_array:
            # A scalar assignment to an array sets its first item.
            words = [*words, *(kept if kept[0].why and not kept[0].text else kept[1:])]
        self.variables[name] = Variable(tuple(words), is_array or (old.is_array and bool(kept)))

    def forget(self, names: Iterable[str], why: str, is_list: bool = False, is_array: bool = False) -> None:
        """Mark variables as unknown."""
        for name in names:
            old = self.get(name)
            word = Word("", "", why, is_list or old.has_flags())
            self.variables[name] = Variable((word,), is_array or (old.is_array and not old.is_unset()))
            self.written.add(name)

    def lose(self, why: str) -> None:
        """Mark all variables and functions as unknown."""
        self.written.add("")
        self.variables, self.functions, self.lost = {}, dict.fromkeys(self.functions), why

    def become(self, others: Sequence[State], why: str) -> None:
        """Join states that are not over: keep what all share."""
        first, *rest = [state for state in others if not state.is_over] or others[:1]
        for one in rest:
            names = one.variables.keys() | first.variables.keys()
            first.variables = {name: _joined(first.get(name), one.get(name), why) for name in names}
            mine, theirs = first.functions, one.functions
            same = {name for name in mine.keys() & theirs.keys() if mine[name] is theirs[name]}
            first.functions = {name: mine[name] if name in same else None for name in mine | theirs}
            first.fixed, first.options = first.fixed | one.fixed, first.options & one.options
            first.constants, first.lost = first.constants | one.constants, first.lost or one.lost
        self.__dict__.update(first.__dict__)


def _joined(one: Variable, other: Variable, why: str) -> Variable:
    if one == other:
        return one
    mine, theirs = [() if side.is_unset() else side.words for side in (one, other)]
    if not (one.is_array or other.is_array):
        # A variable that only one branch sets may have a value, so its default does not apply.
        why = next((word.why for word in (*mine, *theirs) if word.why and UNSET not in word.why), why)
        return Variable((Word("", "", why, one.has_flags() or other.has_flags()),))
    shared = 0
    while shared < min(len(mine), len(theirs)) and mine[shared] == theirs[shared]:
        shared += 1
    # A value after the last shared flag belongs to that flag in only one branch.
    while shared and not all(FLAG.match(rest[shared].text) for rest in (mine, theirs) if len(rest) > shared):
        shared -= 1
    rest = [replace(word, why=word.why or why) for word in (*mine[shared:], *theirs[shared:])]
    return Variable((*mine[:shared], *rest), True)

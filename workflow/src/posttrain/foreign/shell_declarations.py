"""What bash declares: `declare`, `local`, `export`, `readonly`, `typeset` and `unset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign.script import Word
from posttrain.foreign.shell_state import State, Variable, unknown
from posttrain.foreign.shell_tree import Code, Unclear
from posttrain.foreign.shell_words import Words, braces

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_NAME = re.compile(r"[A-Za-z_]\w*")


def declare(shell: Shell, code: Code, state: State) -> State | None:
    """Follow `declare`, `local`, `export`, `readonly` and `typeset`."""
    kind, parts = code.parts[0].text, code.parts[1:]
    expand = Words(shell, state, code.place)
    letters = {"export": "x", "readonly": "r"}.get(kind, "")
    for part in parts:
        if part.type == "variable_assignment" or not part.text.startswith(("-", "+")):
            continue
        if part.text.startswith("+") or not re.fullmatch(r"-[aAilurxngpfF]+", part.text):
            raise Unclear(f"{kind} {part.text} is not followed")
        letters += part.text[1:]
    if kind == "export" and "n" in letters:
        raise Unclear("export -n is not followed")
    if set(letters) & {"p", "f", "F"}:
        state.output, state.status = None, 0
        return state
    for part in parts:
        if part.type != "variable_assignment" and part.text.startswith("-"):
            continue
        name = part.text if part.type == "variable_name" else part.parts[0].text if part.parts else ""
        if part.type not in ("variable_assignment", "variable_name") or not _NAME.fullmatch(name):
            _declare_words(shell, state, kind, letters, expand.fields(part.text))
            continue
        is_local = kind == "local" or (kind in ("declare", "typeset") and state.locals and "g" not in letters)
        _declare_one(shell, state, part, name, letters, bool(is_local))
    state.status = 0
    return state


def _declare_one(shell: Shell, state: State, part: Code, name: str, letters: str, is_local: bool) -> None:
    old = state.variables.get(name)
    value = None
    if part.type == "variable_assignment" and part.parts[-1].type != "array" and "[" not in part.parts[0].text:
        # The value is expanded before the name is hidden.
        texts = braces(part.text, shell.budget.spend)
        if len(texts) > 1 and "+=" in part.text:
            raise Unclear("braces in a declaration are not followed")
        # As an argument it is expanded like one; the last one counts.
        value = Words(shell, state, part.place).joined(re.sub(r"^\w+\+?=", "", texts[-1]))
    if is_local and state.locals and name not in state.locals[-1]:
        state.locals[-1][name] = old
        old = None
        if value is None and re.search(rf"\$\{{?[!#]?{name}\b", part.text):
            raise Unclear(f"{name} is declared by its own value")
        state.variables[name] = Variable()
    elif old is None and part.type == "variable_name":
        if not set(letters) - {"x"}:
            return
        if state.lost or not set(letters) & {"a", "A"}:
            shell.forget(state, name, state.lost or state.get(name).why)
    before = state.variables.get(name, Variable())
    if "r" in before.attributes and part.type == "variable_assignment":
        raise Unclear(f"{name} is read-only")
    added = frozenset(letters) & {"A", "i", "l", "u", "x", "n"}
    state.variables[name] = replace(
        before, attributes=before.attributes | added, is_array=before.is_array or bool(set(letters) & {"a", "A"})
    )
    if part.type == "variable_assignment":
        if "n" in letters:
            if value is None or value.why or not _NAME.fullmatch(value.text):
                raise Unclear(f"what {name} refers to is not known")
            state.variables[name] = Variable({0: value}, False, frozenset("n"))
        elif value is not None:
            shell.assign(state, name, value, bool(re.match(r"\w+\+=", part.text)))
        else:
            shell.assign_text(part, state)
    if "r" in letters:
        found = state.variables[name]
        state.variables[name] = replace(found, attributes=found.attributes | {"r"})


def _declare_words(shell: Shell, state: State, kind: str, letters: str, words: Sequence[Word]) -> None:
    """Declare what words of an expansion say: `export "$NAME=$VALUE"`."""
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:(=)(.*))?", word.text, re.DOTALL)
        if match is None or (word.why and not match[2]) or kind in ("local",) or set(letters) - {"x"}:
            raise Unclear(f"what {kind} declares is not known")
        if match[2] and word.why:
            shell.forget(state, match[1], word.why)
        elif match[2]:
            shell.assign(state, match[1], Word(match[3], word.place))


def unset(shell: Shell, code: Code, state: State) -> State | None:
    """Follow `unset`."""
    state.status = 0
    expand = Words(shell, state, code.place)
    words = [word for part in code.parts[1:] for word in expand.fields(part.text) if part.type != "concatenation"]
    # An index is a pattern for files where it is not quoted.
    words += [Word(part.text.strip("'\""), code.place) for part in code.parts[1:] if part.type == "concatenation"]
    is_function = any(word.text == "-f" for word in words)
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:\[(.*)\])?", word.text)
        if word.text.startswith("-"):
            continue
        if word.why or match is None or "n" in state.get(match[1]).attributes:
            raise Unclear("what it unsets is not known")
        name, index = match[1], match[2]
        if is_function:
            state.functions.pop(name, None)
            continue
        variable = state.variables.get(name, unknown(state.lost) if state.lost else Variable())
        if "r" in variable.attributes or (not index and any(name in hidden for hidden in state.locals[:-1])):
            raise Unclear(f"whether {name} can be unset is not known")
        if not index:
            state.variables[name] = Variable()
            continue
        key = expand.key(name, index)
        if key is None or variable.why or "?" in variable.attributes or (isinstance(key, int) and key < 0):
            shell.forget(state, name, f"line {code.line} unsets one of its elements")
        else:
            items = {one: item for one, item in variable.items.items() if one != key}
            state.variables[name] = replace(variable, items=items)
    return shell.checked(state)

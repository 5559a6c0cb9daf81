"""Assignments, declarations and `unset` of bash."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign.shell_state import State, Variable
from posttrain.foreign.shell_tree import Code, Misread, Unclear

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(.*?)\])?(\+?=)(.*)", re.DOTALL)


def assignments(shell: Shell, code: Code, state: State) -> State | None:
    """Follow one or several assignments."""
    for part in [code] if code.type == "variable_assignment" else code.parts:
        assign(shell, part, state)
    if not re.search(r"\$\((?!\()|`", code.text):
        state.status = 0
    return shell.checked(state)


def assign(shell: Shell, code: Code, state: State) -> None:
    """Set a variable, an element of an array, or an array."""
    match = _ASSIGNMENT.fullmatch(code.text)
    if match is None:
        raise Unclear(f"{code.text[:60]} is not followed")
    name, index, sign, text = match.groups()
    words = shell.words(state, code.place)
    if index is None and code.parts[-1].type == "array":
        if re.search(r"(^|[\s(])\[.*?\]\+?=", text):
            state.forget(name, "an array with indices is not followed")
            return
        # Each of its words keeps its own line.
        items = [(shell.words(state, part.place), part) for part in code.parts[-1].parts[1:-1]]
        found = [word for expand, part in items for word in expand.fields(part.text)]
        shell.budget.spend(5 * len(found))
        state.assign_array(name, found, sign == "+=", any(expand.is_open for expand, _ in items))
        return
    value = words.joined(text)
    if index is None:
        state.assign(name, value, sign == "+=")
    else:
        place = words.arithmetic(index) if "special" not in state.get(name).marks else None
        state.assign_item(name, place if sign == "=" else None, value)
    shell.budget.spend(len(state.get(name).words) // 4)
    if "allexport" in state.options:
        state.variables[name] = replace(state.get(name), marks=state.get(name).marks | {"x"})


def declaration(shell: Shell, code: Code, state: State) -> State | None:
    """Follow `declare`, `local`, `export`, `readonly` and `typeset`."""
    kind, parts = code.parts[0].text, code.parts[1:]
    options = [part.text for part in parts if part.type != "variable_assignment" and part.text[:1] in "-+"]
    letters = "".join(options).replace("-", "") + {"export": "x", "readonly": "r"}.get(kind, "")
    state.status = 0
    if set(letters) & {"p", "f", "F"}:
        return state
    if not re.fullmatch(r"[aAilurx]*", letters):
        raise (Misread if "n" in letters else Unclear)(f"{kind} {' '.join(options)} is not followed")
    is_local = kind in ("local", "declare", "typeset") and shell.depth_of_calls > 0
    if kind == "local" and not is_local:
        state.status = 1
        return shell.checked(state)
    for part in parts:
        if part.text not in options:
            _declare(shell, part, state, letters, is_local)
    return state


def _declare(shell: Shell, part: Code, state: State, letters: str, is_local: bool) -> None:
    name = part.text if part.type == "variable_name" else part.parts[0].text if part.parts else ""
    words = shell.words(state, part.place)
    if part.type not in ("variable_assignment", "variable_name") or not _NAME.fullmatch(name):
        fields = words.fields(part.text)
        match = _ASSIGNMENT.fullmatch(fields[0].text) if len(fields) == 1 and not fields[0].why else None
        if match is None or match[2] or match[3] != "=" or is_local or set(letters) - {"x"}:
            raise Unclear("what it declares is not known")
        state.assign(match[1], replace(fields[0], text=match[4]))
        return
    is_assigned, is_array = part.type == "variable_assignment", part.parts[-1:] and part.parts[-1].type == "array"
    value = None
    if is_assigned and not is_array:
        # The value is expanded before the name is hidden.
        value = words.joined(re.sub(r"^\w+\+?=", "", part.text))
        if re.search(r"\{.*(,|\.\.)", part.text):
            value = replace(value, why=f"{part.text} is not expanded")
    if is_local and f"{shell.depth_of_calls} {name}" not in state.variables:
        if is_array and re.search(rf"\$\{{?[!#]?{name}\b", part.text):
            raise Unclear(f"{name} is declared by its own value")
        state.variables[f"{shell.depth_of_calls} {name}"] = state.get(name)
        state.variables[name] = Variable()
    elif not is_assigned and name not in state.variables and not set(letters) - {"x"}:
        return
    old = state.get(name)
    marks = set(letters) & {"x"} | ({"special"} if set(letters) & set("Ailu") else set())
    state.variables[name] = replace(old, marks=old.marks | marks, is_array=old.is_array or "a" in letters)
    if value is not None:
        state.assign(name, value, bool(re.match(r"\w+\+=", part.text)))
    elif is_assigned:
        assign(shell, part, state)
    if "special" in marks or "r" in letters:
        if "special" in marks:
            state.forget(name, f"{name} has attributes")
        found = state.get(name)
        state.variables[name] = replace(found, marks=found.marks | (set(letters) & {"r"}))


def unset(shell: Shell, code: Code, state: State) -> State | None:
    """Follow `unset`."""
    words = [word for part in code.parts[1:] for word in shell.words(state, code.place).fields(part.text)]
    state.status = 0
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)(\[.*\])?", word.text)
        if word.text in ("-f", "-v"):
            continue
        if match is None or (word.why and not match[2]) or "r" in state.get(match[1]).marks:
            raise Unclear("what it unsets is not known")
        is_hidden = any(f"{depth} {match[1]}" in state.variables for depth in range(shell.depth_of_calls))
        if is_hidden:
            raise Unclear(f"which {match[1]} it unsets is not known")
        if match[2]:
            state.forget(match[1], f"line {code.line} unsets one of its elements")
        elif words[0].text == "-f" or (match[1] in state.functions and match[1] not in state.variables):
            state.functions.pop(match[1], None)
        else:
            state.variables[match[1]] = Variable()
    return shell.checked(state)

"""Assignments of bash: variables, elements of arrays, arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign.script import UNSET, Word
from posttrain.foreign.shell_state import State, Variable, unknown
from posttrain.foreign.shell_tree import Code, Unclear
from posttrain.foreign.shell_words import Words

if TYPE_CHECKING:
    from posttrain.foreign.script import Budget

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(.*?)\])?(\+?=)(.*)", re.DOTALL)


class Variables:
    """What `Shell` does with assignments."""

    budget: Budget
    words: Callable[[State, str], Words]

    def assign(self, state: State, name: str, word: Word, is_more: bool = False) -> None:
        """Set a variable, or an element of an array: `NAME` or `NAME[index]`."""
        base, _, index = name.partition("[")
        base = state.target(base)
        old = state.variables.get(base, Variable() if not state.lost else unknown(state.lost))
        if old.why == f"{UNSET} {base}":
            old = Variable()
        if "r" in old.attributes:
            raise Unclear(f"{base} is read-only")
        expand = self.words(state, word.place)
        key: int | str | None = expand.key(base, index.rstrip("]")) if index else 0
        if isinstance(key, int) and key < 0:
            key += max(old.items, default=-1) + 1
        if key is None or (index and ("?" in old.attributes or old.why)) or (isinstance(key, int) and key < 0):
            self.forget(state, base, f"{word.place} sets one of its elements")
            return
        if word.why and ("i" in old.attributes or is_more):
            self.forget(state, base, word.why)
            return
        if is_more:
            if old.why or (key in old.items and old.items[key].why):
                self.forget(state, base, old.why or old.items[key].why)
                return
            before = old.items[key].text if key in old.items else ""
            word = replace(word, text=before + word.text if "i" not in old.attributes else f"{before or 0}+{word.text}")
        if "i" in old.attributes:
            number = expand.arithmetic(word.text)
            if number is None:
                self.forget(state, base, f"{word.text} is not computed")
                return
            word = Word(str(number), word.place)
        if old.attributes & {"l", "u"} and not word.why:
            word = replace(word, text=word.text.lower() if "l" in old.attributes else word.text.upper())
        self.budget.spend(len(word.text) + len(old.items) // 4)
        items = {**old.items, key: word} if old.is_array or index else {0: word}
        is_array = old.is_array or bool(index)
        attributes = old.attributes if not old.why else frozenset()
        state.variables[base] = Variable(
            items, is_array, attributes | ({"x"} if "allexport" in state.options else set())
        )

    def forget(self, state: State, name: str, why: str) -> None:
        """Know nothing more of a variable."""
        name = state.target(name)
        attributes = state.variables[name].attributes if name in state.variables else frozenset()
        state.variables[name] = replace(unknown(why), attributes=attributes)

    def assign_text(self, code: Code, state: State) -> None:
        """Follow an assignment."""
        match = _ASSIGNMENT.fullmatch(code.text)
        if match is None:
            raise Unclear(f"{code.text[:60]} is not followed")
        name, index, sign, text = match.groups()
        target = name if index is None else f"{name}[{index}]"
        if index is None and code.parts[-1].type == "array":
            self.assign_array(state, name, code.parts[-1], sign == "+=")
        else:
            self.assign(state, target, self.words(state, code.place).joined(text), sign == "+=")

    def assign_array(self, state: State, name: str, array: Code, is_more: bool) -> None:
        """Set an array to its words, each of which keeps its own line."""
        name = state.target(name)
        old = state.variables.get(name, Variable())
        items = dict(old.items) if is_more else {}
        if is_more and (old.why or (state.lost and name not in state.variables)):
            self.forget(state, name, old.why or state.lost)
            return
        attributes = old.attributes - {"?"} | (old.attributes & {"?"} if is_more else set())
        if attributes & {"i", "l", "u", "r"}:
            raise Unclear(f"{name} has attributes")
        place = max((key for key in items if isinstance(key, int)), default=-1) + 1
        for part in array.parts[1:-1]:
            expand = self.words(state, part.place)
            if keyed := re.fullmatch(r"\[(.*?)\](\+?=)(.*)", part.text, re.DOTALL):
                key = expand.key(name, keyed[1])
                if key is None or keyed[2] == "+=" or (isinstance(key, int) and key < 0):
                    raise Unclear("an index is not known")
                items[key] = expand.joined(keyed[3])
                place = key + 1 if isinstance(key, int) else place
                continue
            if "A" in attributes:
                raise Unclear("keys are not known")
            for word in expand.fields(part.text):
                items[place] = word
                place += 1
                attributes |= {"?"} if word.is_list else set()
        self.budget.spend(5 * len(items))
        state.variables[name] = Variable(items, True, frozenset(attributes))

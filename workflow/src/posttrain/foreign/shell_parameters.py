"""Expansions of bash's variables: `$X`, `"${A[@]}"`, `${X:-a default}` and the other operators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign.script import UNSET, Word
from posttrain.foreign.shell_patterns import Pattern, cut, replaced
from posttrain.foreign.shell_state import Variable, unknown
from posttrain.foreign.shell_tree import Ends

if TYPE_CHECKING:
    from posttrain.foreign.shell_words import Part, Words

_BODY = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[((?:[^\[\]]|\[[^\[\]]*\])*)\])?(.*)", re.DOTALL)
_DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
_CASES = {"^^": str.upper, ",,": str.lower}


class Parameters:
    """Expands variables for the words of one state."""

    def __init__(self, words: Words):
        self._words, self._state = words, words.state

    def expand(self, text: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the pieces of an expansion, which begins with a dollar."""
        from posttrain.foreign.shell_words import BREAK, Part

        is_braced = text.startswith("${")
        match = _BODY.fullmatch(text[2:-1] if is_braced else text[1:])
        if match is None or (match[1] and match[4]):
            yield Part(text, f"{text} is not expanded", is_quoted, not is_quoted)
            return
        sign, name, index, rest = match.groups()
        if rest and (operator := next((one for one in _DEFAULTS if rest.startswith(one)), "")):
            yield from self._default(text, name, index, operator, rest[len(operator) :], is_quoted)
            return
        items, why = self._items(name, index, sign)
        is_all = (index or name) in ("@", "*")
        if "nounset" in self._state.options and not (sign or why or items or is_all):
            raise Ends
        items = items or ([] if is_all else [Word("", self._words.place)])
        if sign != "#" and rest and not why:
            is_sparse = index in ("@", "*") and list(self._variable(name).items) != list(range(len(items)))
            if name in ("@", "*") and rest.startswith(":"):
                # `$0` comes before the first.
                items = [Word("$0", self._words.place, "$0 is known only when the script runs"), *items]
            items, why = ([], "${}") if is_sparse else self._changed(items, rest, is_all)
        if why:
            is_split = sign != "#" and (not is_quoted or (index or name) == "@")
            yield Part(text, why if "${" not in why else f"{text} is not expanded", is_quoted, is_split)
            return
        is_list = (index or name) == "@" or ((index or name) == "*" and not is_quoted)
        mark = self._words.field_marks(is_joined=True)[:1]
        for number, word in enumerate(items):
            if number:
                yield BREAK if is_list else Part(mark, is_quoted=True)
            self._words.shell.budget.spend(5)
            yield Part(
                text if word.why and not is_list else word.text,
                word.why,
                is_quoted,
                not is_quoted,
                word if is_list else None,
            )

    def _variable(self, name: str) -> Variable:
        """Return a variable, or what bash keeps by a number or a sign."""
        state = self._state
        if name in ("@", "*") or (name.isdigit() and name != "0"):
            if state.positional is None:
                return unknown("what the function or script is given is not known")
            if name.isdigit():
                given = state.positional[int(name) - 1 : int(name)]
                if not given and not state.locals:
                    return unknown(f"{UNSET} {name}")
                return Variable(dict(enumerate(given)))
            return Variable(dict(enumerate(state.positional)), True)
        if name == "#" and state.positional is not None:
            return Variable({0: Word(str(len(state.positional)), self._words.place)})
        if name == "?" and state.status is not None:
            return Variable({0: Word(str(state.status), self._words.place)})
        if not name[0].isalpha() and name[0] != "_":
            return unknown(f"${name} is not expanded")
        return state.get(name)

    def _items(self, name: str, index: str | None, sign: str) -> tuple[list[Word], str]:
        """Return the values of `NAME[index]`, and why they are not known."""
        place = self._words.place
        if sign == "!" and index in ("@", "*"):
            variable = self._variable(name)
            is_open = "?" in variable.attributes or ("A" in variable.attributes and len(variable.items) > 1)
            why = variable.why or ("its keys are not known" if is_open else "")
            return [Word(str(key), place) for key in sorted(variable.items)], why
        if sign == "!":
            targets, why = self._items(name, index, "")
            target = next(iter(targets), Word("", place))
            if why or target.why or not re.fullmatch(r"[A-Za-z_]\w*(\[\w+\])?|\d+", target.text):
                return [], why or target.why or "${!}"
            inner = re.fullmatch(r"(\w+)(?:\[(.*)\])?", target.text)
            assert inner
            return self._items(inner[1], inner[2], "")
        variable = self._variable(name)
        if variable.why:
            return [], variable.why
        is_all = index in ("@", "*") or name in ("@", "*")
        values = variable.values if is_all else self._element(name, variable, index)
        if values is None or ("?" in variable.attributes and (not is_all or sign == "#")):
            return [], "the index is not known"
        if sign == "#" and not is_all:
            (word,) = values or [Word("", place)]
            why = word.why or ("" if word.text.isascii() else "its length depends on the locale")
            return [Word(str(len(word.text)), place)], why
        if sign == "#":
            return [Word(str(len(values)), place)], "how many there are is not known" if _may_vary(values) else ""
        if is_all and "A" in variable.attributes and len(values) > 1:
            return [], "the order of its keys is not known"
        return values, ""

    def _element(self, name: str, variable: Variable, index: str | None) -> list[Word] | None:
        key = self.key(name, index or "0")
        if key is None:
            return None
        if isinstance(key, int) and key < 0:
            key += max(variable.items, default=-1) + 1
        return [variable.items[key]] if key in variable.items else []

    def key(self, name: str, index: str) -> int | str | None:
        """Return the index or key that a subscript is; None where it is not known."""
        if "A" in self._state.get(name).attributes:
            word = self._words.joined(index)
            return None if word.why else word.text
        return self._words.arithmetic(index)

    # ---- operators ----

    def _default(
        self, text: str, name: str, index: str | None, operator: str, rest: str, is_quoted: bool
    ) -> Iterator[Part]:
        from posttrain.foreign.shell_words import Part

        variable = self._variable(name)
        is_unset = variable.why == f"{UNSET} {name}"
        items, why = ([], "") if is_unset else self._items(name, index, "")
        if not is_unset and not why and "?" in variable.attributes and operator[-1] != "+":
            why = "how many there are is not known"
        if not is_unset and not why:
            has_key = bool(variable.items) if index in (None, "@", "*") and name not in "@*" else bool(items)
            if (index is None and variable.is_array) or (index not in (None, "@", "*")):
                has_key = bool(self._element(name, variable, index))
            is_unset = not has_key
            if operator[0] == ":" and not is_unset:
                why = next((word.why for word in items if word.why), "")
                is_unset = not why and not "".join(word.text for word in items)
        if why:
            # What `${X:=d}` may set is not known any more.
            yield Part(text, why, is_quoted, not is_quoted or (index or name) == "@")
        elif operator[-1] == "+":
            if not is_unset:
                yield from self._inner(rest, is_quoted)
        elif not is_unset:
            plain = f"${{{name}[{index}]}}" if index else f"${{{name}}}"
            yield from self.expand(plain, is_quoted)
        elif operator[-1] == "?":
            if not variable.why:
                raise Ends
            yield Part(text, variable.why, is_quoted, not is_quoted)
        elif operator[-1] == "=":
            word = self._words.joined(rest, is_quoted, is_inner=True)
            self._words.shell.assign(self._state, name if index is None else f"{name}[{index}]", word)
            yield Part(text if word.why else word.text, word.why, is_quoted, not is_quoted)
        else:
            yield from self._inner(rest, is_quoted)

    def _inner(self, rest: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the pieces of a default: outside of quotes, its own characters are split, too."""
        if rest.startswith("~"):
            rest = "${HOME}" + rest[1:]
        for part in self._words.parts(rest, is_quoted, is_inner=True):
            yield part if part.is_quoted else replace(part, is_split=True)

    def _changed(self, items: Sequence[Word], rest: str, is_list: bool) -> tuple[list[Word], str]:
        """Return values with an operator done to each, or to their list."""
        if rest.startswith(":") and is_list:
            return self._slice(list(items), rest[1:])
        found = []
        for word in items:
            if word.why:
                return [], word.why
            self._words.shell.budget.spend(len(word.text) * (1 + len(word.text) // 64) * len(rest))
            text = self._one(word.text, rest)
            if text is None:
                return [], "${}"
            found.append(Word(text, self._words.place))
        return found, ""

    def _one(self, text: str, rest: str) -> str | None:
        if not text.isascii():
            # What a character is depends on the locale.
            return None
        if rest.startswith(":"):
            words, _ = self._slice(list(text), rest[1:])
            return "".join(words) if isinstance(words, list) and not _ else None
        if match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
            pattern = self._pattern(match[2])
            return None if pattern is None else cut(pattern, text, match[1])
        if match := re.fullmatch(r"(//|/#|/%|/)((?:[^/\\]|\\.)*)(?:/(.*))?", rest, re.DOTALL):
            pattern, new = self._pattern(match[2]), self._words.joined(match[3] or "", True)
            if pattern is None or new.why or not pattern or "&" in new.text:
                return None
            if re.search(r"['\"{]", match[2]) or re.search(r"[\\'\"]", match[3] or ""):
                return None
            return replaced(pattern, text, new.text, match[1])
        if rest in _CASES:
            return _CASES[rest](text)
        if rest in ("^", ","):
            return (text[:1].upper() if rest == "^" else text[:1].lower()) + text[1:]
        if rest == "@Q" and "\n" not in text and text.isprintable():
            return "'" + text.replace("'", "'\\''") + "'"
        return None

    def _pattern(self, text: str) -> Pattern | None:
        return self._words.pattern(text)

    def _slice(self, items: list, rest: str) -> tuple[list, str]:
        first, mark, length = rest.partition(":")
        if "?" in rest or "(" in rest.replace("$(", ""):
            return [], "${}"
        start = self._words.arithmetic(first)
        count = self._words.arithmetic(length) if mark else len(items)
        if start is None or count is None or (count < 0 and items and isinstance(items[0], Word)):
            return [], "${}"
        start = max(0, start + len(items)) if start < 0 and start + len(items) >= 0 else start
        if start < 0:
            return [], ""
        found = items[start : start + count if count >= 0 else len(items) + count]
        return found, next((word.why for word in found if isinstance(word, Word) and word.is_list), "")


def _may_vary(values: Sequence[Word]) -> bool:
    return any(word.is_list for word in values)

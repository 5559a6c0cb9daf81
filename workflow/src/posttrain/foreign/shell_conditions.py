"""Conditions of bash: `[ ... ]`, `test` and `[[ ... ]]`, with an answer of yes, no or not known."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.foreign.script import Word
from posttrain.foreign.shell_patterns import matches
from posttrain.foreign.shell_tree import Misread, Unclear
from posttrain.foreign.shell_words import end_of_expansion, end_of_quotes

if TYPE_CHECKING:
    from posttrain.foreign.shell_words import Words

_NUMBERS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_BINARY = {"=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef", *_NUMBERS}
_UNARY = re.compile(r"-[a-zA-Z]")


def condition(words: Words, text: str) -> int | None:
    """Return the status of `[ ... ]` or `[[ ... ]]`: 0 for yes, 1 for no, None where it is not known."""
    if text.startswith("[["):
        tokens = _tokens(text[2:-2])
        reader = _Double(words, tokens)
        found = reader.either()
        if reader.tokens:
            raise Unclear(f"the condition {text[:60]} is not followed")
        return None if found is None else int(not found)
    return test([word for token in _tokens(text[1:-1], is_double=False) for word in words.fields(token)])


def test(words: Sequence[Word]) -> int | None:
    """Return the status of `test` with these words."""
    if any(word.is_list for word in words):
        return None
    found = _single(list(words))
    return None if found is None else int(not found)


def _single(words: list[Word]) -> bool | None:
    if not words:
        return False
    texts = [word.text for word in words]
    if len(words) == 1:
        return None if words[0].why else bool(texts[0])
    if len(words) == 2 and texts[0] == "!":
        return _negated(_single(words[1:]))
    if len(words) == 2:
        return _is(texts[0], words[1])
    if len(words) == 3 and texts[1] in _BINARY:
        return _compared(words[0], texts[1], words[2])
    for joint in ("-o", "-a"):
        if joint in texts[1:-1]:
            at = texts.index(joint, 1)
            left, right = _single(words[:at]), _single(words[at + 1 :])
            return _either(left, right) if joint == "-o" else _both(left, right)
    return _negated(_single(words[1:])) if texts[0] == "!" else None


def _is(sign: str, word: Word) -> bool | None:
    if sign not in ("-z", "-n") or word.why:
        return None
    return bool(word.text) is (sign == "-n")


def _compared(left: Word, sign: str, right: Word) -> bool | None:
    if left.why or right.why:
        return None
    if sign in ("=", "==", "!="):
        return (left.text == right.text) is (sign != "!=")
    sides = [re.fullmatch(r"\s*([-+]?\d{1,18})\s*", word.text) for word in (left, right)]
    if sign not in _NUMBERS:
        return None
    # Bash calls what is no number an error, which counts as no.
    return bool(sides[0] and sides[1] and _NUMBERS[sign](int(sides[0][1]), int(sides[1][1])))


def _negated(found: bool | None) -> bool | None:
    return None if found is None else not found


def _either(left: bool | None, right: bool | None) -> bool | None:
    return True if True in (left, right) else (None if None in (left, right) else False)


def _both(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else (None if None in (left, right) else True)


class _Double:
    """Reads `[[ ... ]]`, whose words are not split."""

    def __init__(self, words: Words, tokens: list[str]):
        self._words, self.tokens = words, tokens

    def either(self) -> bool | None:
        """Return what `||` joins."""
        found = self._both()
        while self.tokens[:1] == ["||"]:
            self.tokens.pop(0)
            found = _either(found, self._both())
        return found

    def _both(self) -> bool | None:
        found = self._one()
        while self.tokens[:1] == ["&&"]:
            self.tokens.pop(0)
            found = _both(found, self._one())
        return found

    def _one(self) -> bool | None:
        if not self.tokens:
            raise Unclear("a condition ends early")
        first = self.tokens.pop(0)
        if first == "!":
            return _negated(self._one())
        if first == "(":
            found = self.either()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise Unclear("a condition ends early")
            return found
        if len(self.tokens) > 1 and self.tokens[0] in _BINARY:
            sign, right = self.tokens.pop(0), self.tokens.pop(0)
            return self._binary(first, sign, right)
        if _UNARY.fullmatch(first) and self.tokens and self.tokens[0] not in ("&&", "||", ")"):
            return _is(first, self._words.joined(self.tokens.pop(0), is_quoted=False))
        word = self._words.joined(first)
        return None if word.why else bool(word.text)

    def _binary(self, first: str, sign: str, second: str) -> bool | None:
        left = self._words.joined(first)
        if sign in _NUMBERS:
            numbers = [self._words.arithmetic(side) for side in (first, second)]
            return None if numbers[0] is None or numbers[1] is None else bool(_NUMBERS[sign](numbers[0], numbers[1]))
        if sign not in ("=", "==", "!="):
            return None
        pattern = self._words.pattern(second)
        if left.why or pattern is None or not left.text.isascii():
            return None
        self._words.shell.budget.spend(len(left.text) * len(second))
        return matches(pattern, left.text) is (sign != "!=")


def _tokens(text: str, is_double: bool = True) -> list[str]:
    """Return the words of a condition as they are spelled.

    Raises:
        Misread: Quotes do not end.
    """
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at].isspace() or text.startswith("\\\n", at):
            at += 1 if text[at].isspace() else 2
            continue
        mark = re.compile(r"&&|\|\||[()]|[<>](?!\()").match(text, at) if is_double else None
        if mark and found[-1:] != ["=~"]:
            found.append(mark[0])
            at = mark.end()
            continue
        end, depth = at, 0
        while end < len(text) and not (text[end].isspace() and not depth):
            char = text[end]
            if is_double and found[-1:] != ["=~"] and (char in "()" or text.startswith(("&&", "||"), end)):
                if char == "(" and text[end - 1] in "?*+@!":
                    raise Unclear("patterns in brackets are not followed")
                break
            depth += (char == "(") - (char == ")") if found[-1:] == ["=~"] else 0
            if char == "\\":
                end += 2
            elif char in "'\"":
                end = end_of_quotes(text, end, char, char == '"')
            elif char in "$`" and text[end + 1 : end + 2] not in ("'", '"'):
                end = max(end + 1, end_of_expansion(text, end))
            else:
                end += 1
        if end <= at:
            raise Misread("a condition is not understood")
        found.append(text[at:end])
        at = end
    return found

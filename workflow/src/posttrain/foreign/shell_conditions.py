"""Conditions of bash: `[ ... ]`, `test` and `[[ ... ]]`, with an answer of yes, no or not known."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from posttrain.foreign.script import Word
from posttrain.foreign.shell_tree import Code, Misread, Unclear
from posttrain.foreign.shell_words import Words

_NUMBERS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_EQUALS = ("=", "==", "!=")
_NESTED = ("binary_expression", "unary_expression", "parenthesized_expression")


def condition(words: Words, code: Code) -> int | None:
    """Return the status of `[ ... ]` or `[[ ... ]]`: 0 for yes, 1 for no, None where it is not known."""
    tokens = _tokens(code)
    if code.text.startswith("[["):
        if len(tokens) > 4 and re.search(r"\w[-+*/%]?:?=\w|\+\+|--|:=", code.text):
            raise Unclear("a condition may set what is not known")
        answer = _joined(words, tokens)
        return None if answer is None else int(not answer)
    return test([word for token in tokens for word in words.fields(token)])


def _tokens(code: Code) -> list[str]:
    """Return the words of a condition, without the tree's idea of their order, which is not always bash's."""
    found: list[Code] = []
    rest = code.parts[1:-1]
    while rest:
        part = rest.pop(0)
        if part.type in _NESTED:
            rest = [*part.parts, *rest]
        else:
            found.append(part)
    end = code.parts[0].node.end_byte
    for part in [*found, code.parts[-1]]:
        gap = code.between(end, part.node.start_byte).replace("\\\n", " ")
        if gap.strip() or not (gap or part.text in ("(", ")")):
            raise Misread("a condition is not understood")
        end = part.node.end_byte
    return [part.text for part in found]


def _joined(words: Words, tokens: Sequence[str]) -> bool | None:
    """Return what `||` and `&&` make of their sides; brackets are not followed."""
    if {"(", ")"} & set(tokens):
        return None
    for mark, decides in (("||", True), ("&&", False)):
        if mark in tokens:
            ends = [at for at, token in enumerate(tokens) if token == mark]
            pairs = zip([-1, *ends], [*ends, len(tokens)], strict=True)
            sides = [_joined(words, tokens[start + 1 : end]) for start, end in pairs]
            return decides if decides in sides else (None if None in sides else not decides)
    signs = next((at for at, token in enumerate(tokens) if token != "!"), 0)
    if signs:
        found = _one(words, tokens[signs:])
        return None if found is None else found is (signs % 2 == 0)
    return _one(words, tokens)


def _one(words: Words, tokens: Sequence[str]) -> bool | None:
    """Return one comparison of `[[ ... ]]`."""
    if len(tokens) == 3 and tokens[1] in _EQUALS:
        found = words.fits(words.joined(tokens[0]), tokens[2])
        return None if found is None else found is (tokens[1] != "!=")
    if len(tokens) == 3 and tokens[1] in _NUMBERS:
        one, two = words.arithmetic(tokens[0]), words.arithmetic(tokens[2])
        return None if one is None or two is None else bool(_NUMBERS[tokens[1]](one, two))
    if len(tokens) > 2:
        return None
    status = test([words.joined(token) for token in tokens])
    return None if status is None else not status


def test(words: Sequence[Word]) -> int | None:
    """Return the status of `test` with these words."""
    if any(word.why for word in words):
        return None
    found = _single(list(words))
    return None if found is None else int(not found)


def _single(words: list[Word]) -> bool | None:
    texts = [word.text for word in words]
    if len(words) < 2:
        return bool("".join(texts))
    if len(words) == 3 and texts[1] in (*_EQUALS, *_NUMBERS):
        return _compared(words[0], texts[1], words[2])
    if texts[0] == "!" and len(words) <= 4 and not {"-a", "-o"} & set(texts):
        found = _single(words[1:])
        return None if found is None else not found
    if len(words) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) is (texts[0] == "-n")
    return None


def _compared(left: Word, sign: str, right: Word) -> bool | None:
    if sign in _EQUALS:
        return (left.text == right.text) is (sign != "!=")
    sides = [re.fullmatch(r"\s*([-+]?\d{1,18})\s*", word.text) for word in (left, right)]
    # Bash calls what is no number an error, which counts as no.
    return bool(sides[0] and sides[1] and _NUMBERS[sign](int(sides[0][1]), int(sides[1][1])))

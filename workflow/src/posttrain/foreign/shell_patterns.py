"""Patterns of bash: `*`, `?` and sets of characters, matched in time that is bounded by the lengths."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from posttrain.foreign.shell_tree import Unclear

# What one place of a pattern takes: a predicate of a character; None: any number of any.
Pattern = list[Callable[[str], bool] | None]
_SET = re.compile(r"\[([!^]?)(\]?[^\]\[]*)\]")


def pattern_of(pieces: Sequence[tuple[str, bool]]) -> Pattern:
    """Return a pattern.

    Args:
        pieces: Each with whether its characters stand for themselves.

    Raises:
        Unclear: It is of a kind that is not followed.
    """
    found: Pattern = []
    # Neighbours of one kind are one piece; a set of characters lies in one.
    joined = [
        ("".join(text for text, _ in group), is_literal)
        for is_literal, group in itertools.groupby(pieces, key=lambda piece: piece[1])
    ]
    for text, is_literal in joined:
        if not is_literal and re.search(r"[?*+@!]\(|\[\[|\[[^\]]*$", text):
            raise Unclear(f"the pattern {text} is not followed")
        at = 0
        while at < len(text):
            char, match = text[at], None if is_literal else _SET.match(text, at)
            at = match.end() if match else at + 1
            if match:
                found.append(_one_of(match[2], bool(match[1])))
            elif char == "*" and not is_literal:
                found.append(None)
            else:
                found.append(_any if char == "?" and not is_literal else char.__eq__)
    return found


def _any(char: str) -> bool:
    return True


def _one_of(text: str, is_inverse: bool) -> Callable[[str], bool]:
    if "\\" in text or not text.isascii():
        raise Unclear("the pattern is not followed")
    ranges = re.findall(r"(.)-(.)|(.)", text)
    return lambda char: is_inverse is not any(low <= char <= high if low else char == one for low, high, one in ranges)


def matches(pattern: Pattern, text: str) -> bool:
    """Tell whether a pattern takes the whole text."""
    at = place = 0
    star, resume = -1, 0
    while at < len(text):
        if place < len(pattern) and (test := pattern[place]) is not None and test(text[at]):
            at, place = at + 1, place + 1
        elif place < len(pattern) and pattern[place] is None:
            star, resume, place = place, at, place + 1
        elif star >= 0:
            resume += 1
            at, place = resume, star + 1
        else:
            return False
    return all(test is None for test in pattern[place:])


def cut(pattern: Pattern, text: str, operator: str) -> str:
    """Return a text without what `#`, `##`, `%` or `%%` takes from it."""
    ends = range(len(text) + 1)
    if operator[0] == "#":
        found = (end for end in (ends if operator == "#" else reversed(ends)) if matches(pattern, text[:end]))
        return text[next(found, 0) :]
    starts = (start for start in (reversed(ends) if operator == "%" else ends) if matches(pattern, text[start:]))
    return text[: next(starts, len(text))]


def replaced(pattern: Pattern, text: str, new: str, operator: str) -> str:
    """Return a text with what `/`, `//`, `/#` or `/%` replaces."""
    found, at = [], 0
    starts = range(len(text)) if operator != "/#" else range(1)
    for start in starts:
        if start < at:
            continue
        ends = range(len(text), start, -1) if operator != "/%" else range(len(text), len(text) - 1, -1)
        end = next((end for end in ends if end > start and matches(pattern, text[start:end])), 0)
        if end:
            found += [text[at:start], new]
            at = end
            if operator != "//":
                break
    return "".join([*found, text[at:]])

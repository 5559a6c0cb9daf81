"""When two answers in mathematics are the same: docs/rewards.md has the rules, tests/unit/reward/pairs.jsonl the cases.

The structure (lists, tuples, sets, intervals, equations, units) is compared here, part by part, and only single
values go to `expression`. The comparison is symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from posttrain.reward.expression import is_proportional, same_value
from posttrain.reward.notation import clean, number, split_unit, squeeze, unit_name, words_of

_MAX_PARTS = 32
_AND = re.compile(r"(?:, ?)?(?:\\text\{ ?(?:and|or) ?\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\lor(?![a-z])|\\vee)")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_NAME = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?'?(?:\([a-zA-Z, ]+\))?")
_MARKED = re.compile(r"^\\text\{\W*(\w|\d+)\W*\}$")
_FUNCTION = re.compile(r"\\(?:a?(?:rc)?(?:sin|cos|tan|sec|csc|cot)|log|ln|exp|sqrt|max|min|int|sum)(?![a-z])")
_ORDER = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_REVERSED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
# What is left to compute between numbers: 6*7, 40+2, (4)(3); a sign or an exponent is not.
_OPERATION = re.compile(r"[\d)}!] ?(?:[+*(-]|\\times|\\cdot|\\div)|\\times|\\cdot|\\div|\) ?\(")


def are_equal(answer: str, label: str) -> bool:
    """Tell whether two final answers are the same.

    Args:
        answer: Of a response, LaTeX or plain; what is longer than `notation.MAX_LENGTH` characters is none.
        label: Of the data.
    """
    left, right = clean(answer), clean(label)
    return bool(left) and bool(right) and _same(left, right)


def _same(left: str, right: str) -> bool:
    """Compare two cleaned answers, the outermost structure first."""
    left, right = _unwrap(left), _unwrap(right)
    if not left or not right:
        return False
    if squeeze(left) == squeeze(right):
        return True
    words = words_of(left), words_of(right)
    if words != (None, None):
        return words[0] == words[1]
    steps: tuple[Callable[[str, str], bool | None], ...]
    steps = (_same_lists, _same_brackets, _same_unions, _same_ranges, _same_ratios, _same_equations)
    for step in steps:
        if (verdict := step(left, right)) is not None:
            return verdict
    return _same_quantity(left, right)


def _unwrap(text: str) -> str:
    """Return what is inside of brackets that mean nothing: "(C)", "{5}", "\\text{13}"."""
    while True:
        plain = _MARKED.sub(r"\1", text)
        found = _brackets(plain)
        if found and (found[0] == "{" or (found[0] == "(" and found[2] == ")" and len(found[1]) == 1)):
            plain = plain[1:-1]
        plain = plain.strip().removeprefix("+").strip()
        if plain == text:
            return text
        text = plain


def _same_lists(left: str, right: str) -> bool | None:
    """Compare lists, which have no order; a list against a tuple is in order, a set is a list."""
    lists = _list_of(left), _list_of(right)
    if all(len(items) < 2 for items in lists) and not any(text.startswith(r"\{") for text in (left, right)):
        return None
    for text, (mine, others) in ((left, lists), (right, lists[::-1])):
        found = _brackets(text)
        if found and found[0] == "(" and found[2] == ")" and len(others) > 1 and len(mine) == 1:
            is_set = (right if text is left else left).startswith(r"\{")
            return not is_set and _in_order(found[1], others)
    return _in_any_order(*lists)


def _list_of(text: str) -> list[str]:
    """Return the parts of a list or set; of a sign for both, both; one part for anything else."""
    found = _brackets(text)
    if found and found[0] == r"\{":
        return found[1]
    if text.count(r"\pm") == 1:
        return [part for sign in "+-" for part in _list_of(text.replace(r"\pm", sign).strip().removeprefix("+"))]
    parts = _split(_THOUSANDS.sub(lambda number: number[0].replace(",", ""), _AND.sub(",", text)), ",;")
    return [part for part in parts if part]


def _same_brackets(left: str, right: str) -> bool | None:
    """Compare tuples, points and intervals: of the same brackets, in order."""
    first, second = _brackets(left), _brackets(right)
    if not first or not second or min(len(first[1]), len(second[1])) < 2:
        return None
    return (first[0], first[2]) == (second[0], second[2]) and _in_order(first[1], second[1])


def _same_unions(left: str, right: str) -> bool | None:
    first, second = (re.split(r"\\cup(?![a-z])", text) for text in (_without_name(left), _without_name(right)))
    return None if len(first) == len(second) == 1 else _in_any_order(first, second)


def _same_ranges(left: str, right: str) -> bool | None:
    """Compare inequalities of one letter as the intervals that they are: "x < 3" and "(-\\infty, 3)"."""
    ranges = [_range_of(text) for text in (left, right)]
    if all(found is None for found in ranges):
        return None
    names = {found[0] for found in ranges if found and found[0]}
    intervals = [found[1] if found else text for found, text in zip(ranges, (left, right), strict=True)]
    return len(names) < 2 and all(_brackets(text) for text in intervals) and _same(*intervals)


def _range_of(text: str) -> tuple[str, str] | None:
    """Return (name, interval) of "a < x < b", "x \\ge a" and "x \\in [a, b]"; None for anything else."""
    if (bare := _without_name(text)) != text:
        return text.partition(r"\in")[0].strip(), bare
    parts = [part.strip() for part in _ORDER.split(text)]
    if len(parts) == 3 and not _NAME.fullmatch(parts[0]):
        parts = [parts[2], _REVERSED[parts[1]], parts[0]]
    if len(parts) == 3 and _NAME.fullmatch(parts[0]):
        name, sign, bound = parts
        closed = sign.startswith("\\")
        if sign in (">", r"\ge"):
            return name, f"{'[' if closed else '('}{bound}, \\infty)"
        return name, f"(-\\infty, {bound}{']' if closed else ')'}"
    if len(parts) == 5 and _NAME.fullmatch(parts[2]):
        low, first, name, second, high = parts
        if {first, second} <= {">", r"\ge"}:
            low, first, second, high = high, second, first, low
        elif not {first, second} <= {"<", r"\le"}:
            return None
        closed_low, closed_high = first in (r"\le", r"\ge"), second in (r"\le", r"\ge")
        return name, f"{'[' if closed_low else '('}{low}, {high}{']' if closed_high else ')'}"
    return None


def _without_name(text: str) -> str:
    name, separator, rest = text.partition(r"\in ")
    name, separator, rest = (name, separator, rest) if separator else text.partition(r"\in[")
    if not separator or not _NAME.fullmatch(name.strip()):
        return text
    return ("[" if separator.endswith("[") else "") + rest.strip()


def _same_ratios(left: str, right: str) -> bool | None:
    first, second = _split(left, ":"), _split(right, ":")
    if len(first) == len(second) == 1 or "=" in left + right:
        return None
    return _in_order(first, second)


def _same_equations(left: str, right: str) -> bool | None:
    """Compare equations: "x = 5" is 5 and not "y = 5", "y = 2x" is "2x - y = 0", "6/2 = 3" is 3."""
    first, second = _sides(left), _sides(right)
    if len(first) == len(second) == 1:
        return None
    if len(first) > 1 and len(second) > 1:
        if squeeze(first[0]) == squeeze(second[0]):
            return _same(first[-1], second[-1]) and _is_chain(first[1:]) and _is_chain(second[1:])
        return is_proportional((first[0], first[-1]), (second[0], second[-1]))
    sides, value = (first, right) if len(first) > 1 else (second, left)
    return _same(sides[-1], value) and _is_chain(sides[1:] if _is_name(sides[0]) else sides)


def _is_chain(sides: Sequence[str]) -> bool:
    """Tell whether "3+2 = 5" holds: what is on the way to the last side may be left to compute."""
    return all(_same(side, sides[-1]) or same_value(side, sides[-1]) for side in sides[:-1])


def _sides(text: str) -> list[str]:
    return [side.strip() for side in text.split("=")]


def _is_name(side: str) -> bool:
    """Tell whether a left side only names what the right side is: x, f(x), (x, y), |AB|; x+y and 2x do not."""
    plain = re.sub(r"_(?:\{[^{}]*\}|\w)", "", side)
    return bool(plain) and not re.search(r"[\d+^-]", plain) and not _FUNCTION.search(plain)


def _same_quantity(left: str, right: str) -> bool:
    """Compare values with units: one that a side leaves out is not missed, a percentage is its value too."""
    (first, unit), (second, other) = split_unit(left), split_unit(right)
    if unit and not other:
        second, other = _with_symbol(second, unit)
    elif other and not unit:
        first, unit = _with_symbol(first, other)
    if unit and other and unit != other:
        return False
    if _same_single(first, second):
        return True
    if {unit, other} == {"%", ""}:
        percent, plain = (number(first), number(second)) if unit == "%" else (number(second), number(first))
        return percent is not None and plain is not None and percent / 100 == plain
    return False


def _with_symbol(text: str, unit: str) -> tuple[str, str]:
    """Return (quantity, unit) where text ends in a letter that is the unit of the other side: "5m"."""
    found = re.fullmatch(r"([-\d.,/ ]+?) ?([a-zA-Z])", text)
    return (found[1], unit) if found and unit_name(found[2]) == unit else (text, "")


def _same_single(left: str, right: str) -> bool:
    """Compare single values. A sum or product that is left to compute is not the number: 6*7 is no answer to 6*7."""
    if squeeze(left) == squeeze(right):
        return True
    values: tuple[Fraction | None, Fraction | None] = number(left), number(right)
    if None not in values:
        return values[0] == values[1]
    if any(value is not None and _OPERATION.search(text) for value, text in zip(values, (right, left), strict=True)):
        return False
    return same_value(_unwrap(left), _unwrap(right))


def _in_order(first: Sequence[str], second: Sequence[str]) -> bool:
    if len(first) != len(second) or len(first) > _MAX_PARTS:
        return False
    return all(_same(a, b) for a, b in zip(first, second, strict=True))


def _in_any_order(first: Sequence[str], second: Sequence[str]) -> bool:
    """Match each part with one of the other side."""
    if len(first) != len(second) or len(first) > _MAX_PARTS:
        return False
    left = list(second)
    for part in first:
        place = next((place for place, other in enumerate(left) if _same(part.strip(), other.strip())), None)
        if place is None:
            return False
        del left[place]
    return True


def _brackets(text: str) -> tuple[str, list[str], str] | None:
    """Return (opening bracket, parts, closing bracket) where one pair of brackets holds everything."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if {r"\{": r"\}", "{": "}"}.get(opening, closing) != closing or opening not in ("(", "[", "{", r"\{"):
        return None
    if closing not in (")", "]", "}", r"\}") or len(text) < len(opening) + len(closing):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
    return (opening, _split(inside, ",;"), closing) if depth == 0 else None


def _split(text: str, separators: str) -> list[str]:
    """Return the parts between separators outside of brackets."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter in separators:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]

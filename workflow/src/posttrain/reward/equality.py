"""When two answers in mathematics are the same: docs/rewards.md has the rules, tests/unit/reward the cases.

Each side is read on its own, the outermost structure first: lists, sets, tuples, intervals, equations, units. Only
single values go to `expression`. math-verify's grammar reads structures too, but drops what a verdict needs: it takes
(1,000) for (1, 0), (1, 2) for an interval, and "or" for two letters. The comparison is symmetric.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.reward.expression import MAX_DEPTH, is_proportional, real_value, same_value
from posttrain.reward.notation import clean, number, split_unit, squeeze, unit_name, words_of

_MAX_PARTS = 32
_OR = re.compile(r"(?:, ?)?(?:\\text\{ ?or ?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z]))")
_AND = re.compile(r"(?:, ?)?(?:\\text\{ ?and ?\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-z])|\\wedge(?![a-z]))")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)", re.ASCII)
_NAME = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?'?(?:\([a-zA-Z, ]+\))?")
_FUNCTION = re.compile(r"\\(?:a?(?:rc)?(?:sin|cos|tan|sec|csc|cot)|log|ln|exp|sqrt|max|min|int|sum)(?![a-z])")
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_DEGREES = re.compile(r" ?\^ ?\{? ?\\circ ?\}?")
_ORDER = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_SETS = re.compile(r"(\\cup|\\cap|\\setminus)(?![a-z])")
_BUILDER = re.compile(r"\\\{ ?([a-zA-Z])(?: ?\\in ?[^:|]*?)? ?(?::|\||\\mid(?![a-z])) ?(.*)\\\}")
_CHOICE = re.compile(r"(?:\\text\{ ?)?\(([A-Z])\) ?\}? *(?!and\b|or\b)([^ ,;].*)")
# What is left to compute between numbers: 6*7, 40+2, (4)(3); a sign or an exponent is not.
_OPERATION = re.compile(r"[\d)}!] ?(?:[+*(-]|\\times|\\cdot|\\div)|\\times|\\cdot|\\div|\) ?\(")


@dataclass(frozen=True)
class Value:
    """A single value: LaTeX, and its unit ("" for none)."""

    text: str
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """Parts in brackets: "" for a list, "{}" for a set, ":" for a ratio, "()", "[)", ... for tuples and intervals."""

    brackets: str
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Region:
    r"""Sets of numbers joined by one of \cup, \cap and \setminus."""

    operator: str
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Statement:
    """An equation, with its sides, or that a name lies in a set: x = 5, 2x + 3 = 7, x < 3."""

    name: str
    value: Node
    sides: tuple[str, ...] = ()


Node = Value | Row | Region | Statement
_REALS = Row("()", (Value(r"-\infty"), Value(r"\infty")))


def are_equal(answer: str, label: str) -> bool:
    """Tell whether two final answers are the same.

    Args:
        answer: Of a response, LaTeX or plain; what is longer than `notation.MAX_LENGTH` characters is none.
        label: Of the data.
    """
    left, right = clean(answer), clean(label)
    if not left or not right or _is_deep(left) or _is_deep(right):
        return False
    if squeeze(left) == squeeze(right):
        return True
    for text, other in ((left, right), (right, left)):
        if (choice := _CHOICE.fullmatch(text)) and not _CHOICE.fullmatch(other):
            # "(C) 42" names the choice, and says what it is.
            return _same(Value(choice[1]), _read(other)) or _same(_read(choice[2]), _read(other))
    return _same(_read(left), _read(right))


def _is_deep(text: str) -> bool:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH


def _read(text: str) -> Node:
    """Return what a cleaned answer says."""
    text = _unwrap(text)
    if text == r"\mathbb{R}":
        return _REALS
    if text == r"\emptyset":
        return Row("{}", ())
    if builder := _BUILDER.fullmatch(text):
        return Statement("", found.value) if isinstance(found := _read(builder[2]), Statement) else Value(text)
    readers: tuple[Callable[[str], Node | None], ...]
    readers = (_read_list, _read_brackets, _read_region, _read_relation, _read_equation, _read_ratio)
    return next((node for reader in readers if (node := reader(text)) is not None), None) or _read_value(text)


def _unwrap(text: str) -> str:
    """Return what is inside of brackets that mean nothing: "(C)", "{5}"."""
    while True:
        found = _brackets(text)
        plain = found[1][0] if found and found[0] in ("()", "") and len(found[1]) == 1 else text
        plain = plain.strip().removeprefix("+").strip()
        if plain == text:
            return text
        text = plain


def _read_list(text: str) -> Node | None:
    """Read "1, 2", "1 and 2", "x < 1 or x > 3" and, as two values, "1 \\pm 2"."""
    is_or, is_and = bool(_OR.search(text)), bool(_AND.search(text))
    parts = _split(_THOUSANDS.sub(_without_commas, _AND.sub(",", _OR.sub(",", text))), ",;")
    if len(parts := [part for part in parts if part]) > 1:
        nodes = tuple(_read(part) for part in parts)
        names = {node.name if isinstance(node, Statement) and not node.sides else "" for node in nodes}
        if is_or != is_and and len(names) == 1 and names != {""}:
            values = tuple(node.value for node in nodes if isinstance(node, Statement))
            return Statement(names.pop(), Region(r"\cup" if is_or else r"\cap", values))
        return Row("", nodes)
    if text.count(r"\pm") == 1:
        return Row("", tuple(_read(text.replace(r"\pm", sign)) for sign in "+-"))
    return None


def _read_brackets(text: str) -> Node | None:
    found = _brackets(text)
    if found is None or (found[0] == "()" and len(found[1]) == 1):
        return None
    return Row(found[0], tuple(_read(part) for part in found[1] if part))


def _read_region(text: str) -> Node | None:
    text = re.sub(r"^(\\mathbb\{R\}) ?-", r"\1\\setminus", text)
    found = _SETS.split(text)
    if len(set(found[1::2])) != 1:
        return None
    return Region(found[1], tuple(_read(part.strip()) for part in found[::2]))


def _read_relation(text: str) -> Node | None:
    """Read "x \\in [a, b]", "a < x < b", "x \\ge a" and "x \\ne a" as a name and a set of numbers."""
    name, separator, rest = text.partition(r"\in")
    if separator and not rest[:1].isalpha() and _NAME.fullmatch(name.strip()):
        return Statement(squeeze(name), _read(rest.strip()))
    name, separator, rest = text.partition(r"\ne ")
    if separator and _NAME.fullmatch(name.strip()):
        return Statement(squeeze(name), Region(r"\setminus", (_REALS, Row("{}", (_read(rest),)))))
    parts = [part.strip() for part in _ORDER.split(text)]
    signs = {part.replace("\\ge", ">").replace("\\le", "<") for part in parts[1::2]}
    if len(signs) != 1:
        return None
    if signs == {">"}:
        parts = [part.replace("\\ge", "\\le").replace(">", "<") for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if _NAME.fullmatch(parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or not _NAME.fullmatch(parts[2]):
        return None
    brackets = ("[" if parts[1] == r"\le" else "(") + ("]" if parts[3] == r"\le" else ")")
    return Statement(squeeze(parts[2]), Row(brackets, (_read(parts[0]), _read(parts[4]))))


def _read_equation(text: str) -> Node | None:
    sides = [side.strip() for side in re.split(r"=|\\approx", text)]
    if len(sides) == 1 or not all(sides):
        return None
    if "\\approx" in text:
        # What is exact stands first: \sqrt{2} \approx 1.414.
        sides = [side.strip() for side in text.partition("\\approx")[0].split("=")] + sides[-1:] * _is_name(sides[0])
        if len(sides) == 1:
            return _read(sides[0])
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides.reverse()
    return Statement(squeeze(sides[0]) if _is_name(sides[0]) else "", _read(sides[-1]), tuple(sides))


def _is_name(side: str) -> bool:
    """Tell whether a side only names what the other one is: x, f(x), (x, y), |AB|; x+y and 2x do not."""
    plain = re.sub(r"_(?:\{[^{}]*\}|\w)|(?<=[a-z])\^\{-1\}(?=\()", "", side)
    return bool(re.search("[a-zA-Z]", plain)) and not re.search(r"[\d+^-]", plain) and not _FUNCTION.search(plain)


def _read_ratio(text: str) -> Node | None:
    parts = _split(text, ":")
    return Row(":", tuple(_read(part) for part in parts)) if len(parts) > 1 and all(parts) else None


def _read_value(text: str) -> Node:
    if _TRIGONOMETRY.search(text):
        # The degrees of \cos 60^\circ belong to what is computed.
        return Value(text)
    quantity, unit = split_unit(_THOUSANDS.sub(_without_commas, text.replace("{,}", "")))
    if _DEGREES.search(quantity):
        quantity, unit = _DEGREES.sub("", quantity), unit or "degree"
    return Value(_unwrap(quantity), unit)


def _same(left: Node, right: Node) -> bool:
    if isinstance(left, Statement) or isinstance(right, Statement):
        return _same_statements(left, right)
    if isinstance(left, Region) or isinstance(right, Region):
        return _same_regions(left, right)
    if isinstance(left, Row) and isinstance(right, Row):
        return _same_rows(left, right)
    for row, other in ((left, right), (right, left)):
        if isinstance(row, Row):
            return row.brackets == "{}" and len(row.parts) == 1 and _same(row.parts[0], other)
    return isinstance(left, Value) and isinstance(right, Value) and _same_values(left, right)


def _same_statements(left: Node, right: Node) -> bool:
    """Compare statements: "x = 5" is 5 and not "y = 5", "y = 2x" is "2x - y = 0", "6/2 = 3" is 3."""
    if isinstance(left, Statement) and isinstance(right, Statement):
        if left.name == right.name and (
            left.name or squeeze("".join(left.sides[:1])) == squeeze("".join(right.sides[:1]))
        ):
            return _same(left.value, right.value) and _is_chain(left.sides[1:]) and _is_chain(right.sides[1:])
        if left.sides and right.sides:
            return is_proportional((left.sides[0], left.sides[-1]), (right.sides[0], right.sides[-1]))
        return not (left.name and right.name) and _same(left.value, right.value)
    statement, other = (left, right) if isinstance(left, Statement) else (right, left)
    assert isinstance(statement, Statement)
    return _same(statement.value, other) and _is_chain(statement.sides[bool(statement.name) :])


def _is_chain(sides: Sequence[str]) -> bool:
    """Tell whether "3+2 = 5" holds: what is on the way to the last side may be left to compute."""
    return all(_same(_read(side), _read(sides[-1])) or same_value(side, sides[-1]) for side in sides[:-1])


def _same_rows(left: Row, right: Row) -> bool:
    kinds = {left.brackets, right.brackets}
    if "{}" in kinds and kinds <= {"{}", ""}:
        # A set has each of its members once: \{1, 2, 2\} is \{1, 2\}.
        return _covers(left, right) and _covers(right, left)
    if kinds == {""}:
        return _match(left.parts, right.parts)
    if len(kinds) == 2 and kinds != {"", "()"}:
        return False
    return len(left.parts) == len(right.parts) <= _MAX_PARTS and all(map(_same, left.parts, right.parts))


def _covers(left: Row, right: Row) -> bool:
    parts = (left.parts, right.parts)
    return max(map(len, parts)) <= _MAX_PARTS and all(any(_same(one, other) for other in parts[1]) for one in parts[0])


def _match(first: Sequence[Node], second: Sequence[Node]) -> bool:
    """Tell whether each part has a partner of its own on the other side, whatever the order: augmenting paths."""
    if len(first) != len(second) or len(first) > _MAX_PARTS:
        return False
    partners: dict[int, int] = {}

    def place(one: int, tried: set[int]) -> bool:
        for other in range(len(second)):
            if other not in tried and _same(first[one], second[other]):
                tried.add(other)
                if other not in partners or place(partners[other], tried):
                    partners[other] = one
                    return True
        return False

    return all(place(one, set()) for one in range(len(first)))


def _same_regions(left: Node, right: Node) -> bool:
    """Compare sets of numbers by their members, and sets that have letters part by part."""
    first, second = _as_set(left), _as_set(right)
    if first is not None and second is not None:
        return bool(first == second)
    if not isinstance(left, Region) or not isinstance(right, Region) or left.operator != right.operator:
        return False
    return left.operator != r"\setminus" and _match(left.parts, right.parts)


def _as_set(node: Node) -> Any:
    """Return SymPy's set of the numbers of intervals, sets, and what joins them; None for anything else."""
    import sympy

    if isinstance(node, Region):
        sets = [_as_set(part) for part in node.parts]
        join = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}[node.operator]
        return None if None in sets else functools.reduce(join, sets)
    if not isinstance(node, Row):
        return None
    values: list[Any] = [
        real_value(part.text) if isinstance(part, Value) and not part.unit else None for part in node.parts
    ]
    if None in values or (node.brackets != "{}" and (len(values) != 2 or node.brackets[:1] not in ("(", "["))):
        return None
    if node.brackets == "{}":
        return sympy.FiniteSet(*values)
    if values[0] > values[1]:
        return None
    return sympy.Interval(*values, node.brackets[0] == "(", node.brackets[1] == ")")


def _same_values(left: Value, right: Value) -> bool:
    """Compare values with units: one that a side leaves out is not missed, a percentage is its value too."""
    words = words_of(left.text), words_of(right.text)
    if words != (None, None):
        return words[0] == words[1] and left.unit == right.unit
    if left.unit and not right.unit:
        right = _with_symbol(right, left.unit)
    elif right.unit and not left.unit:
        left = _with_symbol(left, right.unit)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if {left.unit, right.unit} == {"%", ""}:
        percent, plain = (left, right) if left.unit == "%" else (right, left)
        share, value = number(percent.text), number(plain.text)
        # 50 may leave out the sign of 50 %; a number below 1 is the share itself.
        is_same = share == value and (value is not None and (abs(value) >= 1 or not value))
        return is_same or (share is not None and share / 100 == value)
    return _same_texts(left.text, right.text)


def _with_symbol(value: Value, unit: str) -> Value:
    """Read the letter that a text ends in as the unit of the other side: "5m"."""
    found = re.fullmatch(r"([-\d.,/ ]+?) ?([a-zA-Z])", value.text)
    return Value(found[1], unit) if found and unit_name(found[2]) == unit else value


def _same_texts(left: str, right: str) -> bool:
    """Compare single values. A sum or product that is left to compute is not the number: 6*7 is no answer to 6*7."""
    if squeeze(left) == squeeze(right):
        return True
    values = number(left), number(right)
    if None not in values:
        return values[0] == values[1]
    if any(value is not None and _OPERATION.search(text) for value, text in zip(values, (right, left), strict=True)):
        return False
    return same_value(left, right)


def _brackets(text: str) -> tuple[str, list[str]] | None:
    """Return (kind, parts) where one pair of brackets holds everything; the kind of a LaTeX group is ""."""
    text = text.replace(r"\langle", "\\(").replace(r"\rangle", "\\)")
    opening = text[:2] if text.startswith("\\") else text[:1]
    closing = text[-2:] if text[-2:-1] == "\\" else text[-1:]
    kind = {r"\{\}": "{}", "{}": "", r"\(\)": "<>"}.get(opening + closing, opening + closing)
    if kind not in ("{}", "", "<>", "()", "[]", "(]", "[)") or len(text) < len(opening + closing) or not text:
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
    if depth:
        return None
    # Commas without a space group thousands where others have one, or where a group begins with 0: (1,000).
    if re.search(r", ", inside) or re.search(r",0\d\d(?!\d)", inside):
        inside = _THOUSANDS.sub(_without_commas, inside)
    return kind, _split(inside, ",;")


def _without_commas(found: re.Match[str]) -> str:
    return found[0].replace(",", "")


def _split(text: str, separators: str) -> list[str]:
    """Return the parts between separators outside of brackets."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter in separators:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]

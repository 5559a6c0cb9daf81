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

from posttrain.reward.expression import is_proportional, read_expression, real_value, same_value
from posttrain.reward.notation import clean, depths, number, split_unit, squeeze, unit_name, words_of

_MAX_PARTS = 32
_OR = re.compile(r",? ?(?:\\text\{ ?or ?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z]))")
_AND = re.compile(r",? ?(?:\\text\{ ?and ?\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-z])|\\wedge(?![a-z]))")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)", re.ASCII)
_NAME = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?'?(?:\([a-zA-Z, ]+\))?")
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_FUNCTION = re.compile(_TRIGONOMETRY.pattern + r"|\\(?:log|ln|exp|sqrt|max|min|int|sum)(?![a-z])")
_DEGREES = re.compile(r" ?\^ ?\{? ?\\circ ?\}?")
_ORDER = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
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
    """Parts: of a list (""), of brackets ("{}" for a set, "()", "[)", ...), or joined by one of ∪, ∩, ∖ and ":"."""

    kind: str
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Statement:
    """An equation, with its sides, or that a name lies in a set: x = 5, 2x + 3 = 7, x < 3."""

    name: str
    value: Node
    sides: tuple[str, ...] = ()


Node = Value | Row | Statement
_REALS = Row("()", (Value(r"-\infty"), Value(r"\infty")))


def are_equal(answer: str, label: str) -> bool:
    """Tell whether two final answers are the same.

    Args:
        answer: Of a response, LaTeX or plain; what is longer than `notation.MAX_LENGTH` characters is none.
        label: Of the data.
    """
    left, right = clean(answer), clean(label)
    if not left or not right:
        return False
    for text, other in ((left, right), (right, left)):
        if (choice := _CHOICE.fullmatch(text)) and not _CHOICE.fullmatch(other):
            # "(C) 42" names the choice, and says what it is.
            return any(_same(_read(part), _read(other)) for part in choice.groups())
    return squeeze(left) == squeeze(right) or _same(_read(left), _read(right))


def _read(text: str) -> Node:
    """Return what a cleaned answer says."""
    text = _unwrap(text)
    if text in (r"\mathbb{R}", r"\emptyset"):
        return _REALS if text == r"\mathbb{R}" else Row("{}", ())
    if builder := _BUILDER.fullmatch(text):
        return Statement("", found.value) if isinstance(found := _read(builder[2]), Statement) else Value(text)
    readers: tuple[Callable[[str], Node | None], ...]
    readers = (_read_list, _read_brackets, _read_joined, _read_relation, _read_equation)
    return next((node for reader in readers if (node := reader(text))), None) or _read_value(text)


def _unwrap(text: str) -> str:
    """Return what is inside of brackets that mean nothing: "(C)", "{5}"."""
    found = _brackets(text)
    plain = found[1][0] if found and found[0] in ("()", "") and len(found[1]) == 1 else text
    plain = plain.strip().removeprefix("+").strip()
    return text if plain == text else _unwrap(plain)


def _read_list(text: str) -> Node | None:
    """Read "1, 2", "1 and 2", "x < 1 or x > 3" and, as two values, "1 \\pm 2"."""
    parts = _split(_without_commas(_AND.sub(",", _OR.sub(",", text))), ",;")
    if len(parts) == 1:
        is_pair = text.count(r"\pm") == 1
        return Row("", tuple(_read(text.replace(r"\pm", sign)) for sign in "+-")) if is_pair else None
    nodes = tuple(_read(part) for part in parts)
    ranges = [node for node in nodes if isinstance(node, Statement) and not node.sides]
    joints = ["∪"] * bool(_OR.search(text)) + ["∩"] * bool(_AND.search(text))
    if len(joints) == 1 and len(ranges) == len(nodes) and len({node.name for node in ranges}) == 1:
        return Statement(ranges[0].name, Row(joints[0], tuple(node.value for node in ranges)))
    return Row("", nodes)


def _read_brackets(text: str) -> Node | None:
    found = _brackets(text)
    return Row(found[0], tuple(map(_read, found[1]))) if found and (found[0] != "()" or len(found[1]) > 1) else None


def _read_joined(text: str) -> Node | None:
    """Read unions, intersections and differences of sets."""
    found = {joint: _split(text, joint) for joint in "∪∩∖"}
    return next((Row(joint, tuple(map(_read, parts))) for joint, parts in found.items() if len(parts) > 1), None)


def _read_relation(text: str) -> Node | None:
    """Read "x \\in [a, b]", "a < x < b", "x \\ge a" and "x \\ne a" as a name and a set of numbers."""
    found = re.fullmatch(rf"({_NAME.pattern}) ?\\(in|ne)(?![a-z]) ?(.+)", text)
    if found:
        rest = _read(found[3])
        return Statement(squeeze(found[1]), rest if found[2] == "in" else Row("∖", (_REALS, Row("{}", (rest,)))))
    parts = [part.strip() for part in _ORDER.split(text)]
    signs = {part.replace("\\ge", ">").replace("\\le", "<") for part in parts[1::2]}
    if signs == {">"}:
        parts = [part.replace("\\ge", "\\le").replace(">", "<") for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if _NAME.fullmatch(parts[0]) else [*parts, "<", r"\infty"]
    if len(signs) != 1 or len(parts) != 5 or not _NAME.fullmatch(parts[2]):
        return None
    kind = ("[" if parts[1] == r"\le" else "(") + ("]" if parts[3] == r"\le" else ")")
    return Statement(squeeze(parts[2]), Row(kind, (_read(parts[0]), _read(parts[4]))))


def _read_equation(text: str) -> Node | None:
    exact, approximate, rounded = text.partition(r"\approx")
    sides = [side.strip() for side in exact.split("=")]
    if approximate and _is_name(sides[-1]):
        # Otherwise what is exact stands first: \sqrt{2} \approx 1.414.
        sides.append(rounded.strip())
    if len(sides) == 1 or not all(sides):
        ratio = _split(text, ":")
        return _read(exact) if approximate else Row(":", tuple(map(_read, ratio))) if len(ratio) > 1 else None
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides.reverse()
    return Statement(squeeze(sides[0]) if _is_name(sides[0]) else "", _read(sides[-1]), tuple(sides))


def _is_name(side: str) -> bool:
    """Tell whether a side only names what the other one is: x, f(x), (x, y), |AB|; x+y and 2x do not."""
    plain = re.sub(r"_(?:\{[^{}]*\}|\w)|(?<=[a-z])\^\{-1\}(?=\()", "", side)
    return bool(re.search("[a-zA-Z]", plain)) and not re.search(r"[\d+^-]", plain) and not _FUNCTION.search(plain)


def _read_value(text: str) -> Node:
    if _TRIGONOMETRY.search(text):
        # The degrees of \cos 60^\circ belong to what is computed.
        return Value(text)
    quantity, unit = split_unit(_without_commas(text))
    if _DEGREES.search(quantity):
        quantity, unit = _DEGREES.sub("", quantity), unit or "degree"
    return Value(_unwrap(quantity), unit)


def _same(left: Node, right: Node) -> bool:
    if isinstance(left, Statement) or isinstance(right, Statement):
        return _same_statements(left, right)
    if isinstance(left, Row) and isinstance(right, Row):
        return _same_rows(left, right)
    for row, other in ((left, right), (right, left)):
        if isinstance(row, Row):
            return row.kind == "{}" and len(row.parts) == 1 and _same(row.parts[0], other)
    return isinstance(left, Value) and isinstance(right, Value) and _same_values(left, right)


def _same_statements(left: Node, right: Node) -> bool:
    """Compare statements: "x = 5" is 5 and not "y = 5", "y = 2x" is "2x - y = 0", "6/2 = 3" is 3."""
    if isinstance(left, Statement) and isinstance(right, Statement):
        first, second = (squeeze(one.name or "".join(one.sides[:1])) for one in (left, right))
        if first != second and left.sides and right.sides:
            return is_proportional((left.sides[0], left.sides[-1]), (right.sides[0], right.sides[-1]))
        is_same = (first == second or not first or not second) and _same(left.value, right.value)
        return is_same and _is_chain(left.sides[1:]) and _is_chain(right.sides[1:])
    statement, other = (left, right) if isinstance(left, Statement) else (right, left)
    assert isinstance(statement, Statement)
    return _same(statement.value, other) and _is_chain(statement.sides[bool(statement.name) :])


def _is_chain(sides: Sequence[str]) -> bool:
    """Tell whether "3+2 = 5" holds: what is on the way to the last side may be left to compute."""
    return all(_same(_read(side), _read(sides[-1])) or same_value(side, sides[-1]) for side in sides[:-1])


def _same_rows(left: Row, right: Row) -> bool:
    kinds, size = {left.kind, right.kind}, max(len(left.parts), len(right.parts))
    if size > _MAX_PARTS:
        return False
    if kinds & {*"∪∩∖"}:
        first, second = _as_set(left), _as_set(right)
        if first is not None and second is not None:
            return bool(first == second)
    if kinds <= {"{}", ""} and "{}" in kinds:
        # A set has each of its members once: \{1, 2, 2\} is \{1, 2\}.
        return all(
            any(_same(one, other) for other in others.parts)
            for ones, others in ((left, right), (right, left))
            for one in ones.parts
        )
    if len(left.parts) != len(right.parts) or (len(kinds) == 2 and kinds != {"", "()"}):
        return False
    is_any_order = left.kind == right.kind and left.kind in ("", "∪", "∩")
    return _match(left.parts, right.parts) if is_any_order else all(map(_same, left.parts, right.parts))


def _match(first: Sequence[Node], second: Sequence[Node]) -> bool:
    """Tell whether each part has a partner of its own on the other side, whatever the order: augmenting paths."""
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


def _as_set(node: Node) -> Any:
    """Return SymPy's set of the numbers of intervals, sets, and what joins them; None for anything else."""
    import sympy

    if not isinstance(node, Row):
        return None
    if join := {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}.get(node.kind):
        sets = [_as_set(part) for part in node.parts]
        return None if None in sets else functools.reduce(join, sets)
    ends: list[Any] = [real_value(part.text) for part in node.parts if isinstance(part, Value) and not part.unit]
    if None in ends or len(ends) != len(node.parts):
        return None
    if node.kind == "{}":
        return sympy.FiniteSet(*ends)
    if node.kind[:1] not in ("(", "[") or len(ends) != 2 or ends[0] > ends[1]:
        return None
    return sympy.Interval(*ends, node.kind[0] == "(", node.kind[1] == ")")


def _same_values(left: Value, right: Value) -> bool:
    """Compare values with units: one that a side leaves out is not missed, a percentage is its value too."""
    words = words_of(left.text), words_of(right.text)
    if words != (None, None):
        return words[0] == words[1] and left.unit == right.unit
    left, right = _with_symbol(left, right.unit), _with_symbol(right, left.unit)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    is_same = _same_texts(left.text, right.text)
    if {left.unit, right.unit} != {"%", ""}:
        return is_same
    percent, plain = (left.text, right.text) if left.unit == "%" else (right.text, left.text)
    # 50 may leave out the sign of 50 %; a number below 1 is the share itself.
    value = real_value(plain)
    return value is not None and ((is_same and abs(value) >= 1) or same_value(rf"\frac{{{percent}}}{{100}}", plain))


def _with_symbol(value: Value, unit: str) -> Value:
    """Read the letter that a text ends in as the unit of the other side: "5m"."""
    found = re.fullmatch(r"([-\d.,/ ]+?) ?([a-zA-Z])", value.text)
    return Value(found[1], unit) if unit and not value.unit and found and unit_name(found[2]) == unit else value


def _same_texts(left: str, right: str) -> bool:
    """Compare single values. A sum or product that is left to compute is not the number: 6*7 is no answer to 6*7."""
    if squeeze(left) == squeeze(right):
        return True
    values = number(left), number(right)
    if None not in values:
        return values[0] == values[1]
    if not same_value(left, right):
        return False
    is_rational = getattr(read_expression(left), "is_Rational", False)
    return not is_rational or bool(_OPERATION.search(left)) == bool(_OPERATION.search(right))


def _brackets(text: str) -> tuple[str, list[str]] | None:
    """Return (kind, parts) where one pair of brackets holds everything; the kind of a LaTeX group is ""."""
    found = re.fullmatch(r"(\\?[{(\[])(.*?)(\\?[})\]])", text.replace(r"\langle", r"\(").replace(r"\rangle", r"\)"))
    if not found:
        return None
    kind = {r"\{\}": "{}", "{}": "", r"\(\)": "<>"}.get(found[1] + found[3], found[1] + found[3])
    inside = found[2]
    levels = [0, *depths(inside)]
    if kind not in ("{}", "", "<>", "()", "[]", "(]", "[)") or min(levels) < 0 or levels[-1]:
        return None
    # Commas without a space group thousands where others have one, or where a group begins with 0: (1,000).
    return kind, _split(_without_commas(inside) if re.search(r", |,0\d\d(?!\d)", inside) else inside, ",;")


def _without_commas(text: str) -> str:
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.replace("{,}", ""))


def _split(text: str, separators: str) -> list[str]:
    """Return the parts between separators outside of brackets, without empty ones."""
    levels = depths(text)
    ends = [place for place, letter in enumerate(text) if letter in separators and not levels[place]]
    parts = [text[begin:end].strip() for begin, end in zip([0, *(end + 1 for end in ends)], [*ends, None], strict=True)]
    return [part for part in parts if part] or [text]

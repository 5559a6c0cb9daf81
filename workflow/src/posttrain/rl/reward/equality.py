"""Decides whether two mathematical answers are equal: docs/rewards.md has the rules, tests/unit/rl/reward the cases.

Each side is parsed separately, outermost structure first: brackets, lists, relations, equations, set operations, units.
Only single values go to `expression`. math-verify's grammar also parses structures, but loses needed information: it
reads (1,000) as (1, 0), (1, 2) as an interval, and "or" as two letters. The comparison is symmetric.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from posttrain.rl.reward.expression import is_proportional, read_expression, real_value, same_value
from posttrain.rl.reward.notation import clean, depths, split_unit, squeeze, words_of

_MAX_PARTS = 32
_BRACKETS = ("{}", "⦃⦄", "⟨⟩", "()", "[]", "(]", "[)")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)", re.ASCII)
_NAME = re.compile(r"(?!e$|\\pi)(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?'?(?:\([a-zA-Z, ]+\))?")
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_FUNCTION = re.compile(_TRIGONOMETRY.pattern + r"|\\(?:log|ln|exp|sqrt|max|min|int|sum)(?![a-z])")
_MEMBER = re.compile(rf"({_NAME.pattern}) ?([∈≠]) ?(.+)")
_MIRRORED = {">": "<", "≥": "≤"}
_CHOICE = re.compile(r"(?:\\text\{ ?)?\(([A-Z])\) ?\}? *([^ ,;∨∧].*)")
# Uncomputed arithmetic: 6*7, 40+2, (4)(3); but not a sign, an exponent or 3 \times 10^5.
_OPERATION = re.compile(r"[\d)}!] ?[+(-]|(?:\*|\\times|\\cdot|\\div)(?! ?10 ?\^)")


@dataclass(frozen=True)
class Node:
    """A parsed answer.

    Args:
        kind: "" for a single value, "," for a list, the brackets of a set ("⦃⦄"), a tuple or an interval ("()", "[)"),
            one of ∪, ∩, ∖ and ":" that joins the parts, "=" for an equation, "∈" for a name that lies in a set: x < 3.
        text: LaTeX of a value, the name or first side of an equation, or the name.
        unit: Of a value; "" for none.
        parts: In their order; the sides of an equation without a name.
    """

    kind: str
    text: str = ""
    unit: str = ""
    parts: tuple[Node, ...] = ()


def are_equal(answer: str, label: str) -> bool:
    """Return whether two final answers are the same.

    Args:
        answer: The response's answer, LaTeX or plain; longer than `notation.MAX_LENGTH` characters equals nothing.
        label: The data's label.
    """
    left, right = clean(answer), clean(label)
    for text, other in ((left, right), (right, left)):
        if (choice := _CHOICE.fullmatch(text)) and not _CHOICE.fullmatch(other):
            # "(C) 42" names a choice and its content.
            return any(_same(_read(part), _read(other)) for part in choice.groups())
    return bool(left) and (squeeze(left) == squeeze(right) or _same(_read(left), _read(right)))


def _read(text: str) -> Node:
    """Parse a cleaned answer."""
    text = text.strip().removeprefix("+")
    if brackets := _brackets(text):
        kind, parts = brackets[0], tuple(map(_read, brackets[1]))
        # "(C)", "{5}" and a one-number set equal their content.
        is_one = len(parts) == 1 and (kind in ("()", "{}") or (kind == "⦃⦄" and not parts[0].kind))
        return parts[0] if is_one else Node(kind.replace("{}", ","), parts=parts)
    text = _without_commas(text)
    structure = _read_list(text) or _read_relation(text) or _read_equation(text) or _read_joined(text)
    return structure or _read_value(text)


def _read_list(text: str) -> Node | None:
    """Read "1, 2", "1 and 2", "1 \\pm 2" and, as one set of numbers, "x < 1 or x > 3"."""
    nodes = tuple(map(_read, parts)) if len(parts := _split(text, ",;∨∧")) > 1 else ()
    joints = [joint for word, joint in ("∨∪", "∧∩") if word in text]
    if len(joints) == 1 and {node.kind for node in nodes} == {"∈"} and len({node.text for node in nodes}) == 1:
        return Node("∈", nodes[0].text, parts=(Node(joints[0], parts=tuple(node.parts[0] for node in nodes)),))
    return Node(",", parts=nodes) if nodes else None


def _read_relation(text: str) -> Node | None:
    """Read "x \\in [a, b]", "a < x < b", "x \\ge a" and "x \\ne a" as a name and a set of numbers."""
    if found := _MEMBER.fullmatch(text):
        members = found[3] if found[2] == "∈" else f"(-∞,∞)∖⦃{found[3]}⦄"
        return Node("∈", squeeze(found[1]), parts=(_read(members),))
    parts = re.split(" ?([<≤>≥]) ?", text)
    if not {"<", "≤"} & {*parts}:
        parts = [_MIRRORED.get(part, part) for part in reversed(parts)]
    if len(parts) == 3:
        parts = ["-∞", "<", *parts] if _NAME.fullmatch(parts[0]) else [*parts, "<", "∞"]
    if len(parts) != 5 or _MIRRORED.keys() & {*parts} or not _NAME.fullmatch(parts[2]):
        return None
    kind = ("[" if parts[1] == "≤" else "(") + ("]" if parts[3] == "≤" else ")")
    return Node("∈", squeeze(parts[2]), parts=(Node(kind, parts=(_read(parts[0]), _read(parts[4]))),))


def _read_equation(text: str) -> Node | None:
    sides = text.split("=")
    if len(sides) == 1:
        return None
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides.reverse()
    return Node("=", squeeze(sides[0]), parts=tuple(map(_read, sides[_is_name(sides[0]) :])))


def _is_name(side: str) -> bool:
    """Return whether a side is only a name for the other one: x, f(x), (x, y), |AB|; but not x+y or 2x."""
    plain = re.sub(r"_(?:\{[^{}]*\}|\w)|(?<=[a-z])\^\{-1\}(?=\()", "", side)
    return bool(re.search("[a-zA-Z]", plain)) and not re.search(r"[\d+^-]", plain) and not _FUNCTION.search(plain)


def _read_joined(text: str) -> Node | None:
    """Read unions, intersections and differences of sets, and ratios."""
    found = {joint: _split(text, joint) for joint in "∪∩∖:"}
    return next((Node(joint, parts=tuple(map(_read, parts))) for joint, parts in found.items() if len(parts) > 1), None)


def _read_value(text: str) -> Node:
    # The degrees in \cos 60^\circ are part of the expression, not a unit.
    quantity, unit = (text, "") if _TRIGONOMETRY.search(text) else split_unit(text)
    node = _read(quantity) if unit else Node("", text)
    return node if node.kind else Node("", node.text, unit)


def _same(left: Node, right: Node) -> bool:
    kinds = {left.kind, right.kind}
    if kinds & {"=", "∈"}:
        return _same_statements(left, right)
    if kinds == {""}:
        return _same_values(left, right)
    return "" not in kinds and _same_rows(left, right)


def _same_statements(left: Node, right: Node) -> bool:
    """Compare statements: "x = 5" is 5 and not "y = 5", "y = 2x" is "2x - y = 0", "6/2 = 3" is 3."""
    statements = [node for node in (left, right) if node.kind in ("=", "∈")]
    if len(statements) == 2 and (left.text != right.text or not _is_name(left.text)):
        return left.kind == right.kind == "=" and is_proportional(
            left.text, left.parts[-1].text, right.text, right.parts[-1].text
        )
    values = [node.parts[-1] if node in statements else node for node in (left, right)]
    return _same(*values) and all(map(_is_chain, statements))


def _is_chain(statement: Node) -> bool:
    """Return whether a chain such as "3+2 = 5" holds; only its last side must be computed."""
    *sides, last = statement.parts
    return all(_same(side, last) or same_value(side.text, last.text) for side in sides)


def _same_rows(left: Node, right: Node) -> bool:
    kinds, sizes = {left.kind, right.kind}, {len(left.parts), len(right.parts)}
    if max(sizes) > _MAX_PARTS:
        return False
    if kinds & {*"∪∩∖"} and None not in (sets := [_as_set(left), _as_set(right)]):
        return bool(sets[0] == sets[1])
    if "⦃⦄" in kinds and kinds <= {"⦃⦄", ","}:
        # Sets ignore duplicates: \{1, 2, 2\} is \{1, 2\}.
        return _finds_all(left, right, is_set=True) and _finds_all(right, left, is_set=True)
    if len(sizes) == 2 or (len(kinds) == 2 and kinds != {",", "()"}):
        return False
    if len(kinds) == 1 and left.kind in (",", "∪", "∩"):
        # Without units, a part may match several others, so a match in either direction counts.
        return _finds_all(left, right) or _finds_all(right, left)
    return all(map(_same, left.parts, right.parts))


def _finds_all(row: Node, others: Node, *, is_set: bool = False) -> bool:
    """Return whether each part equals one of the others in any order; parts pair up one to one, except in sets."""
    left = list(others.parts)
    for one in row.parts:
        partner = next((other for other in left if _same(one, other)), None)
        if partner is None:
            return False
        if not is_set:
            left.remove(partner)
    return True


def _as_set(node: Node) -> Any:
    """Return a number, set, interval, or their union, intersection or difference as a SymPy set; else None."""
    import sympy

    if join := {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}.get(node.kind):
        sets = [_as_set(part) for part in node.parts]
        return None if None in sets else functools.reduce(join, sets)
    members = node.parts if node.kind else (node,)
    ends: list[Any] = [None if part.kind or part.unit else real_value(part.text) for part in members]
    if None in ends:
        return None
    if node.kind in ("", "⦃⦄"):
        return sympy.FiniteSet(*ends)
    if node.kind not in ("()", "[]", "(]", "[)") or len(ends) != 2 or ends[0] > ends[1]:
        return None
    return sympy.Interval(*ends, node.kind[0] == "(", node.kind[1] == ")")


def _same_values(left: Node, right: Node) -> bool:
    """Compare values with units; one side may omit its unit, and a percentage equals its value."""
    words = words_of(left.text), words_of(right.text)
    if words != (None, None):
        return words[0] == words[1] and left.unit == right.unit
    if left.unit and right.unit and left.unit != right.unit:
        return False
    is_same = _same_texts(left.text, right.text)
    if {left.unit, right.unit} != {"%", ""}:
        return is_same
    percent, plain = (left.text, right.text) if left.unit == "%" else (right.text, left.text)
    # 50 may omit the sign of 50 %; a number below 1 is the fraction itself.
    value = real_value(plain)
    return value is not None and ((is_same and abs(value) >= 1) or same_value(rf"\frac{{{percent}}}{{100}}", plain))


def _same_texts(left: str, right: str) -> bool:
    """Compare single values. Uncomputed arithmetic does not count as a number: 6*7 is no answer to 6*7."""
    if squeeze(left) == squeeze(right):
        return True
    if not same_value(left, right):
        return False
    is_rational = getattr(read_expression(left), "is_Rational", False)
    return not is_rational or bool(_OPERATION.search(left)) == bool(_OPERATION.search(right))


def _brackets(text: str) -> tuple[str, list[str]] | None:
    """Return (kind, parts) if one pair of brackets encloses everything; the kind of a LaTeX group is "{}"."""
    kind, inside = text[:1] + text[-1:], text[1:-1]
    levels = [0, *depths(inside)]
    if kind not in _BRACKETS or min(levels) < 0 or levels[-1]:
        return None
    # Commas without a space separate thousands if other commas have a space, or if a group begins with 0: (1,000).
    inside = _without_commas(inside) if re.search(r", |,0\d\d(?!\d)", inside) else inside
    return kind, _split(inside, ",;∨∧") if inside.strip() else []


def _without_commas(text: str) -> str:
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def _split(text: str, separators: str) -> list[str]:
    """Return the parts between separators outside of brackets, without empty ones; of 1 \\pm 2, both."""
    levels = depths(text)
    ends = [place for place, letter in enumerate(text) if letter in separators and not levels[place]]
    parts = [text[begin:end].strip() for begin, end in zip([0, *(end + 1 for end in ends)], [*ends, None], strict=True)]
    pairs = [(part, "+-" if part.count("±") == 1 else "±") for part in parts if part]
    return [part.replace("±", sign) for part, signs in pairs for sign in signs] or [text]

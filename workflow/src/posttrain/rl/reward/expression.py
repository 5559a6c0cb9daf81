"""Compares values of LaTeX expressions, parsed by math-verify's grammar, numerically at sample points.

Nothing is evaluated as Python: the grammar (latex2sympy2_extended) builds SymPy objects. Potentially expensive text is
rejected before parsing, so that a hostile response costs microseconds instead of a killed worker.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction
from typing import Any

from posttrain.rl.reward.notation import squeeze

# Fast path for plain numbers: the grammar takes milliseconds. At most three exponent digits: 1e999999999 fits nowhere.
_DIGITS = r"\d{1,200}(?:\.\d{0,200})?|\.\d{1,200}"
_NUMBER = re.compile(
    rf"([+-]?(?:{_DIGITS}))(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{{?([+-]?\d{{1,3}})\}}?|/({_DIGITS}))?", re.ASCII
)
_MAX_COMMANDS = 60
_MAX_CELLS = 64
_REFUSED = re.compile(
    r"\d{201}"  # numbers of any length
    r"|\d['_]|\d[eE][+-]?\d|\d\.\d+\.\d|--|\+\+|(?<![_\d])\d+ \d"  # no numbers
    r"|[-+*/^=]$|^[*/^]"  # incomplete expressions
    r"|\^ ?\{? ?-? ?\d{5}"  # exponents over 9,999
    r"|\^ ?\{[^{}]*\d ?\^|\^ ?\d ?\^|\^ ?\{[^{}]*\^[^{}]*\{[^{}]*\^"  # towers of powers
    r"|!\)*!|\d{5} ?!|[)}\]] ?!"  # factorials of more than 9,999, of factorials and of expressions
    r"|\\(?:sum|prod|int|iint|oint|lim|bigcup|dots|ldots|cdots)(?![a-z])"  # unbounded computations
    r"|\\binom\{[^{}]*(?:\d{5}|[\^!])|\\binom\{[^{}]*\}\{[^{}]*(?:\d{5}|[\^!])",
    re.ASCII,
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])", re.ASCII)
# SymPy evaluates numeric powers eagerly, such as (9^{9999})^{9999}.
_POWER = re.compile(r"\^ ?(?:\{[^{}]*?(\d{2,})|(\d+))")
_MAX_POWER = 10_000
_POINTS = ("3/7", "11/5", "23/9", "-2/3", "-17/4")
_PRECISION = 30
_TOLERANCE = 1e-22


def same_value(left: str, right: str) -> bool:
    """Return whether two expressions from `notation.clean` have the same value, for all values of their letters.

    Numbers are exact (0.5 is 1/2, 0.333 is not 1/3). Both sides are computed to 30 digits, with letters at five points;
    points at which either side is not real are skipped if two points remain. Returns False if either side cannot be
    parsed or is too expensive.
    """
    first, second = read_expression(left), read_expression(right)
    if first is None or second is None:
        return False
    if getattr(first, "shape", None) != getattr(second, "shape", None):
        return False
    cells = (side.flat() if hasattr(side, "shape") else [side] for side in (first, second))
    return all(_same_at_points(a, b) for a, b in zip(*cells, strict=True))


def is_proportional(*sides: str) -> bool:
    """Return whether two equations (two sides each) are equivalent: their differences are proportional."""
    read = [read_expression(side) for side in sides]
    if any(side is None or hasattr(side, "shape") for side in read):
        return False
    first, second = read[0] - read[1], read[2] - read[3]
    ratios = [a / b for a, b in _values(first, second) if b and a]
    return len(ratios) > 1 and _agree([(ratio, ratios[0]) for ratio in ratios])


def real_value(text: str) -> Any:
    """Return a real number, exact or rounded to 20 digits, or an infinity; None for anything else."""
    import sympy

    value = {"∞": sympy.oo, "-∞": -sympy.oo}.get(text.replace(" ", "")) or read_expression(text)
    if value is None or hasattr(value, "shape") or not value.is_extended_real or value.free_symbols:
        return None
    return value if value.is_infinite or value.is_Rational else sympy.Rational(str(value.evalf(_PRECISION).round(20)))


def is_costly(text: str) -> bool:
    """Return whether an expression is no answer, or may be slow to parse or compute."""
    if text.count("&") > _MAX_CELLS or _REFUSED.search(text):
        return True
    powers = (max(1, int(found[1] or found[2])) for found in _POWER.finditer(text))
    return text.count("\\") > _MAX_COMMANDS + text.count("\\\\") * 2 or math.prod(powers) > _MAX_POWER


def warm_up() -> None:
    """Import and warm up the parser: the first expressions take seconds."""
    for text in (r"\frac{\sqrt{2}}{3}-x^2", r"2\pi+\sin x", r"\begin{pmatrix}|x|&5!\\\binom{5}{2}&7\end{pmatrix}"):
        read_expression(text)


@functools.lru_cache(maxsize=256)
def read_expression(text: str) -> Any:
    """Return a SymPy expression or matrix; None for anything else or too expensive text."""
    # Imported here because it takes a second, which code that only lists graders should not spend.
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    try:
        if plain := _NUMBER.fullmatch(squeeze(text)):
            return sympy.Rational(Fraction(f"{plain[1]}e{plain[2] or 0}") / Fraction(plain[3] or 1))
        if is_costly(text):
            return None
        # Use the grammar, not `math_verify.parse`, which reads X as x, drops known words and units, and sets deadlines
        # by signals, which do not work in threads; the worker enforces ours.
        found = latex2sympy(
            _DECIMAL.sub(_as_fraction, text),
            is_real=True,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        if not isinstance(found, (sympy.Expr, sympy.MatrixBase)):
            return None
        return found.xreplace({sympy.Symbol("i", real=True): sympy.I}).doit()
    except MemoryError:
        raise
    except Exception:
        # The grammar raises plain `Exception` for unreadable text, and SymPy any type for undefined values.
        return None


def _as_fraction(decimal: re.Match[str]) -> str:
    return rf"{{\frac{{{decimal[1]}{decimal[2]}}}{{1{'0' * len(decimal[2])}}}}}"


def _same_at_points(left: Any, right: Any) -> bool:
    import sympy

    if left == right or (left.is_Rational and right.is_Rational):
        return left == right and not left.has(sympy.nan, sympy.zoo, sympy.oo)
    return _agree(_values(left, right))


def _values(left: Any, right: Any) -> list[tuple[Any, Any]]:
    """Return both values at all points where both are real; if fewer than two, where both are finite."""
    import sympy

    letters = sorted(left.free_symbols | right.free_symbols, key=str)
    points = [
        {letter: sympy.Rational(point) + sympy.Rational(place, 13) for place, letter in enumerate(letters)}
        for point in (_POINTS if letters else _POINTS[:1])
    ]
    # Not `subs`: exact numbers in nested roots take exponential time.
    pairs = [tuple(side.evalf(_PRECISION, subs=point) for side in (left, right)) for point in points]
    finite = [pair for pair in pairs if all(value.is_number and value.is_finite for value in pair)]
    real = [pair for pair in finite if all(value.is_real for value in pair)]
    return real if len(real) > 1 else finite


def _agree(pairs: list[tuple[Any, Any]]) -> bool:
    """Compare each pair of values relative to the larger one: 1/2004! is not 1/2006!."""
    return bool(pairs) and all(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)

"""Values of LaTeX expressions: math-verify's grammar reads them, and they are compared at points, exactly enough.

Nothing is evaluated as Python: the grammar (latex2sympy2_extended) makes SymPy objects. What a response could make
expensive is rejected before it is read, so that hostile text costs microseconds and not a killed worker.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from posttrain.reward.notation import MAX_LENGTH, number

_MAX_COMMANDS = 60
_MAX_CELLS = 64
_REFUSED = re.compile(
    r"\d{201}"  # numbers of any length
    r"|\d['_]|\d[eE][+-]?\d|\d\.\d+\.\d|--|\+\+"  # no numbers
    r"|[-+*/^=]$|^[*/^]"  # half an expression
    r"|\^ ?\{? ?-? ?\d{5}"  # exponents over 9,999
    r"|\^ ?\{[^{}]*\d ?\^|\^ ?\d ?\^|\^ ?\{[^{}]*\^[^{}]*\{[^{}]*\^"  # towers of powers
    r"|!\)*!|\d{5} ?!|[)}\]] ?!"  # factorials of more than 9,999, of factorials and of what is computed
    r"|\\(?:sum|prod|int|iint|oint|lim|bigcup|dots|ldots|cdots)(?![a-z])"  # no end in sight
    r"|\\binom\{[^{}]*(?:\d{5}|[\^!])|\\binom\{[^{}]*\}\{[^{}]*(?:\d{5}|[\^!])"
    r"|[\x00-\x08]",
    re.ASCII,
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])", re.ASCII)
# Powers of expressions are computed by SymPy as far as they are numbers: (9^{9999})^{9999} would be.
_POWER = re.compile(r"\^ ?(?:\{[^{}]*?(\d{2,})|(\d+))")
_MAX_POWER = 10_000
_POINTS = ((3, 7), (11, 5), (23, 9), (-2, 3), (-17, 4))
_DIGITS = 30
_TOLERANCE = 1e-22


def same_value(left: str, right: str) -> bool:
    """Tell whether two expressions from `notation.clean` have the same value, for all values of their letters.

    Numbers in them are exact (0.5 is 1/2, 0.333 is not 1/3). Both are computed to 30 digits, for letters at five
    points: where either is not real it does not count, as long as two points are left. False too where either cannot
    be read, or would cost too much.
    """
    first, second = read_expression(left), read_expression(right)
    if first is None or second is None:
        return False
    if hasattr(first, "shape") or hasattr(second, "shape"):
        if getattr(first, "shape", None) != getattr(second, "shape", None):
            return False
        return all(_same_at_points(a, b) for a, b in zip(first.flat(), second.flat(), strict=True))
    return _same_at_points(first, second)


def is_proportional(left: tuple[str, str], right: tuple[str, str]) -> bool:
    """Tell whether two equations, each a pair of sides, say the same: their differences are multiples of each other."""
    sides = [read_expression(side) for side in (*left, *right)]
    if any(side is None or hasattr(side, "shape") for side in sides):
        return False
    first, second = sides[0] - sides[1], sides[2] - sides[3]
    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return False
    ratios = [a / b for a, b in _values(first, second) if b and a]
    return len(ratios) > 1 and all(_is_close(ratio, ratios[0]) for ratio in ratios)


def real_value(text: str) -> Any:
    """Return a real number, exact or rounded to 20 digits, or an infinity; None for anything else."""
    import sympy

    value = {r"\infty": sympy.oo, r"-\infty": -sympy.oo}.get(text.replace(" ", "")) or read_expression(text)
    if value is None or hasattr(value, "shape") or not value.is_extended_real or value.free_symbols:
        return None
    return value if value.is_infinite or value.is_Rational else sympy.Rational(str(value.evalf(_DIGITS).round(20)))


def is_costly(text: str) -> bool:
    """Tell whether an expression is no answer, or one whose reading or computing could take more than moments."""
    if len(text) > MAX_LENGTH or _REFUSED.search(text):
        return True
    if text.count("\\") > _MAX_COMMANDS + text.count("\\\\") * 2 or text.count("&") > _MAX_CELLS:
        return True
    total = 1
    for found in _POWER.finditer(text):
        total *= max(1, int(found[1] or found[2]))
        if total > _MAX_POWER:
            return True
    return False


def warm_up() -> None:
    """Import what reads expressions, and let it read some: the first ones take seconds."""
    for text in (r"\frac{\sqrt{2}}{3}-x^2", r"2\pi+\sin x", r"\begin{pmatrix}|x|&5!\\\binom{5}{2}&7\end{pmatrix}"):
        read_expression(text)


@functools.lru_cache(maxsize=256)
def read_expression(text: str) -> Any:
    """Return a SymPy expression or matrix; None for anything else, and for what would cost too much."""
    # Imported here: it takes a second, which answers that are plain numbers or words do not need.
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if (exact := number(text)) is not None:
        return sympy.Rational(exact.numerator, exact.denominator)
    if is_costly(text):
        return None
    try:
        # The grammar itself and not `math_verify.parse`: that one reads X as x, drops words and units that it knows,
        # and sets its deadlines by signals, which a thread cannot have; ours is the worker's.
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
        # The grammar raises plain `Exception` for text that it cannot read, and SymPy any kind for what is undefined.
        return None


def _as_fraction(decimal: re.Match[str]) -> str:
    return rf"{{\frac{{{decimal[1]}{decimal[2]}}}{{1{'0' * len(decimal[2])}}}}}"


def _same_at_points(left: Any, right: Any) -> bool:
    import sympy

    if left == right:
        return not left.has(sympy.nan, sympy.zoo, sympy.oo)
    values = _values(left, right)
    return bool(values) and all(_is_close(a, b) for a, b in values)


def _values(left: Any, right: Any) -> list[tuple[Any, Any]]:
    """Return both values at all points where both are real; with fewer than two such points, where they are finite."""
    import sympy

    letters = sorted(left.free_symbols | right.free_symbols, key=str)
    points = [
        {letter: sympy.Rational(*point) + sympy.Rational(place, 13) for place, letter in enumerate(letters)}
        for point in (_POINTS if letters else _POINTS[:1])
    ]
    # Not `subs`: exact numbers in nested roots take exponential time.
    pairs = [tuple(side.evalf(_DIGITS, subs=point) for side in (left, right)) for point in points]
    finite = [pair for pair in pairs if all(value.is_number and value.is_finite for value in pair)]
    real = [pair for pair in finite if all(value.is_real for value in pair)]
    return real if len(real) > 1 else finite


def _is_close(left: Any, right: Any) -> bool:
    """Compare by the larger one: 1/2004! is not 1/2006!."""
    if not left or not right:
        return bool(left == right)
    return bool(abs(left - right) <= _TOLERANCE * max(abs(left), abs(right)))

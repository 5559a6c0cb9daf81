"""How answers in mathematics are written: one spelling for many, plain numbers, units, words.

Only text: the values of expressions are in `expression`. Every step takes at most moments for `MAX_LENGTH` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

# The longest final answer of MATH-500 has 159 characters (verl, math_dapo.py); longer texts are not answers.
MAX_LENGTH = 1000
# Exact fractions of any length would take as much time as a response chooses.
_MAX_NUMBER_LENGTH = 200

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011", "-"),
        **dict.fromkeys("\u00a0\u2009\u200a\u202f\u3000\t\n\r~", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "°": r"^\circ "},
        **{"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "√": r"\sqrt "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset "},
        **{"€": r"\euro ", "£": r"\pounds ", "ℝ": r"\mathbb{R}", "∩": r"\cap ", "⟨": r"\langle ", "⟩": r"\rangle "},
    }
)
_FUNCTIONS = "sqrt|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|exp"
_STYLES = "mathrm|mathbf|mathit|mathsf|boldsymbol|bm|text|textbf|textit|textrm|textsf|texttt|mbox|operatorname|emph"
_NUMERAL = r"(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:\{,\}\d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r",\s*\\!\s*|(?<=\d)\{,\}(?=\d)", "{,}"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", ""),
    (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?|bf|rm|it)(?![a-zA-Z])\.?", ""),
    (r"(?<!\\)\\[,!;:> ]|\\q?quad(?![a-zA-Z])", " "),
    (r"\\(?:text)?color\{[^{}]*\}|\\(?:underline|boxed|fbox)(?=\{)", ""),
    (rf"\\(?:{_STYLES})\s*\{{\s*({_FUNCTIONS}|gcd|lcm)\s*\}}", r"\\\1 "),
    # A style says nothing, so its content stays as it is, signs included; words stay marked as words, and so does a
    # letter behind a space: the unit of "5\text{ m}".
    (rf"\\(?:{_STYLES})\s*\{{(?=[^{{}}\\\d=<>+*^$]*[^\W\d_]{{2}}[^{{}}\\\d=<>+*^$]*\}}| +[A-Za-z] *\}})", r"\\words{"),
    (rf"\\(?:{_STYLES})(?![a-zA-Z])", ""),
    (r"\\words", r"\\text"),
    (r"\\([lr]?)[vV]ert(?![a-z])", "|"),
    (r"\\[dtc](frac|binom)(?![a-z])", r"\\\1"),
    (r"(\\(?:frac|binom)) *([0-9a-zA-Z])", r"\1{\2}"),
    (rf"(\\(?:frac|binom) *{_GROUP}) *([0-9a-zA-Z])", r"\1{\2}"),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|infty)(?![A-Za-z])", r"\\\1"),
    (r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])", r"\\infty"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\lg(?![a-z])", r"\\log "),
    (r"\\log_(?:e|\{e\})", r"\\ln "),
    (r"\\(?:leqslant|leq|lt=)(?![a-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geq)(?![a-z])|>=", r"\\ge "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\neq(?![a-z])|!=|\\not ?=", r"\\ne "),
    (r"\\backslash(?![a-z])", r"\\setminus "),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"\\(?:mathbb|Bbb) ?\{?([A-Z])\}?", r"\\mathbb{\1}"),
    (r"\\R(?![a-z])|^(?:\\text\{ ?)?all real(?:s| numbers) ?\}?$", r"\\mathbb{R}"),
    (
        r"^(?:\\text\{ ?)?(?i:the |final |correct )*(?i:answer)(?: is|:|=)+ ?\}?:? *(?=.)|^\\(?:approx|simeq)(?![a-z])",
        "",
    ),
    (r"\\varnothing(?![a-z])|\\\{ *\\\}", r"\\emptyset"),
    # 0.1\overline{6}, 0.\dot{3} and 0.(3) are fractions, which math-verify cannot read.
    (
        r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{(\d+)\}|\((\d+)\))",
        lambda m: _recurring(*m.groups(default="")),
    ),
    (r"^(?:negative|minus) (?=[\d\\])", "-"),
    (
        rf"(?<![\w.,])({_NUMERAL}) ?(\\text\{{ ?)?(dozen|hundred|thousand|million|billion|trillion)(?![a-z])",
        lambda m: f"{_plain(_decimal(m[1]) * _SCALES[m[3]])}{m[2] or ''}",
    ),
    # A group that is no argument prints as what it holds.
    (r"(?<![a-zA-Z}\]_^\\])\{([^{},\\]*)\}", r"\1"),
    (r"\\text\{[ .]*\}", ""),
    (r"^([A-Z])\)$", r"\1"),
    (r"\+\s*-|-\s+\+", "-"),
    (r"\s+", " "),
)
_EMPHASIS = re.compile(r"^([*_]{1,3}|`+)(.*)\1$")
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _SPELLINGS)

# Exponents of at most three digits: "1e999999999" would be a number that no memory holds.
_POWER = r"(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{?([+-]?\d{1,3})\}?"
_SCIENTIFIC = re.compile(rf"([+-]?)({_NUMERAL})(?:{_POWER})?", re.ASCII)
_POWER_OF_TEN = re.compile(r"([+-]?)10\^(?:\{([+-]?\d{1,3})\}|(\d))", re.ASCII)
_QUOTIENT = re.compile(rf"([+-]?)(?:\\frac\{{([+-]?)({_NUMERAL})\}}\{{([+-]?)({_NUMERAL})\}})", re.ASCII)
_SLASH = re.compile(rf"([+-]?)()({_NUMERAL})/\(?([+-]?)({_NUMERAL})\)?", re.ASCII)
_MIXED = re.compile(r"([+-]?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))", re.ASCII)


def clean(text: str) -> str:
    """Return an answer in one spelling: without delimiters of mathematics, styles, sizes and spacing.

    Args:
        text: Of any length; more than `MAX_LENGTH` characters are no answer.

    Returns:
        The spelling, empty for no answer.
    """
    if len(text) > MAX_LENGTH or any(ord(letter) < 9 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        return ""
    plain = _EMPHASIS.sub(r"\2", text.translate(_CHARACTERS).strip()).replace("**", "^")
    for pattern, spelling in _COMPILED:
        plain = pattern.sub(spelling, plain)
    return plain.strip().lstrip("=;,: ").rstrip(" .;,:").removeprefix("+").strip()


def squeeze(text: str) -> str:
    """Return text without the white space that says nothing: "4 2" stays two numbers, a command keeps its end."""
    return re.sub(r"(\\[a-zA-Z]+ (?=[a-zA-Z])|\d (?=\d))| ", r"\1", text)


def number(text: str) -> Fraction | None:
    """Return the exact value of a plain number: "-1,234", "3.50", "2/3", "1\\frac{1}{2}", "3 \\times 10^5", "1e-3".

    Args:
        text: From `clean`.

    Returns:
        None for anything else, for a division by zero, and for more than 200 characters.
    """
    if len(text) > _MAX_NUMBER_LENGTH:
        return None
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom, other_top, other_bottom = mixed.groups()
        denominator = int(bottom or other_bottom)
        if denominator == 0:
            return None
        return _signed(sign, int(whole) + Fraction(int(top or other_top), denominator))
    plain = squeeze(text)
    if power := _POWER_OF_TEN.fullmatch(plain):
        return _signed(power[1], Fraction(10) ** int(power[2] or power[3]))
    if quotient := _QUOTIENT.fullmatch(plain) or _SLASH.fullmatch(plain):
        sign, above, top, below, bottom = quotient.groups()
        divisor = _decimal(bottom)
        return _signed(sign, _signed(above, _decimal(top)) / _signed(below, divisor)) if divisor else None
    if scientific := _SCIENTIFIC.fullmatch(plain):
        sign, digits, exponent = scientific.groups()
        return _signed(sign, _decimal(digits) * Fraction(10) ** int(exponent or 0))
    return None


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _decimal(digits: str) -> Fraction:
    plain = re.sub(r"[ ,{}]", "", digits)
    return Fraction(f"0{plain}0" if "." in plain else plain)


def _plain(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _recurring(whole: str, once: str, again: str, bracketed: str) -> str:
    again = again or bracketed
    if len(whole + once + again) > _MAX_NUMBER_LENGTH:
        return ""
    tail = Fraction(int(again), 10 ** len(again) - 1)
    return _plain((int(f"{whole}{once}" or "0") + tail) / 10 ** len(once))


# Short units, and the word each of them is short for.
_UNITS = {
    **{"mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "ft": "foot"},
    **{"feet": "foot", "inches": "inch", "mi": "mile", "yd": "yard", "mg": "milligram", "g": "gram", "kg": "kilogram"},
    **{"lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "milliliter", "l": "liter", "s": "second", "sec": "second"},
    **{"min": "minute", "h": "hour", "hr": "hour", "mph": "mile/hour", "pct": "%", "percent": "%", "percentage": "%"},
    **{"usd": "dollar", "deg": "degree", "am": "am", "pm": "pm"},
}
_NOT_UNITS = {
    *("and", "or", "to", "theta", "alpha", "beta", "gamma", "delta", "infinity", "mod", "base", "not"),
    *("squared", "cubed", "plus", "minus", "times", "over", "more", "less", "than", "divided", "factorial", "half"),
}
_SIGNS = (
    (re.compile(r"^(-?) ?\\\$ ?"), r"\1", "dollar"),
    (re.compile(r"^(-?) ?\\euro ?"), r"\1", "euro"),
    (re.compile(r"^(-?) ?\\pounds ?"), r"\1", "pound sterling"),
    (re.compile(r" ?\\euro$"), "", "euro"),
    (re.compile(r" ?\\\$$"), "", "dollar"),
    (re.compile(r" ?\\?%$"), "", "%"),
    (re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degrees?)$"), "", "degree"),
)
_UNIT = re.compile(
    r"(?:\\text\{([^{}]*)\}|(?<=[\d}) ])([A-Za-z]+(?:/[A-Za-z]+)?(?: [A-Za-z]+){0,3}))(?: ?\^ ?\{?([23])\}?)?$"
)
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3"}
_BASE = re.compile(r"^(\d+)_(?:\{(\d{1,2})\}|(\d{1,2}))$", re.ASCII)


def split_unit(text: str) -> tuple[str, str]:
    """Return (quantity, unit): ("5", "centimeter") of "5 \\text{ cm}", ("52", "base 8") of "52_8"; "" for no unit."""
    if base := _BASE.match(squeeze(text)):
        return base[1], f"base {base[2] or base[3]}"
    for pattern, rest, unit in _SIGNS:
        if pattern.search(text) and (quantity := pattern.sub(rest, text).strip()):
            return quantity, unit
    found = _UNIT.search(text)
    quantity = text[: found.start()].strip() if found else ""
    if found and re.search(r"\d|\\[a-z]", quantity) and (_is_unit(found[2]) if found[2] else _is_marked_unit(found[1])):
        return quantity, unit_name(found[1] or found[2] or "") + (f"^{found[3]}" if found[3] else "")
    return text, ""


def unit_name(text: str) -> str:
    """Return a unit by one name, in lower case and singular: "square cm" is "centimeter^2"."""
    parts = []
    for part in re.split(r"/| per ", text.strip(" .").lower()):
        words = part.split()
        power = _POWERS.get(words[0], "") if len(words) > 1 else ""
        name = " ".join(words[1:] if power else words)
        name = _UNITS.get(name, name)
        parts.append((name[:-1] if name.endswith("s") and len(name) > 3 else name) + power)
    return "/".join(parts)


def _is_marked_unit(words: str) -> bool:
    return not _NOT_UNITS & set(words.split())


def _is_unit(words: str) -> bool:
    """Tell a unit from a product of letters: a word has three letters and a vowel, or is known."""
    return all(
        word.lower() in _UNITS or (len(word) > 2 and bool(set("aeiou") & set(word)) and word not in _NOT_UNITS)
        for word in re.split("[ /]", words)
    )


def words_of(text: str) -> str | None:
    """Return words in lower case, without "\\text"; None for what may be mathematics, single letters included."""
    plain = re.sub(r" +", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip(" .")
    if not re.fullmatch(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*", plain):
        return None
    is_word = len(plain) > 1 if r"\text{" in text else len(plain) > 2 and bool(set("aeiouy") & set(plain.lower()))
    return plain.lower() if is_word or not plain.isascii() else None

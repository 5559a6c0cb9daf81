"""How answers in mathematics are written: one spelling for many, plain numbers, units.

Only text: nothing here knows values that are not plain numbers, and no step takes more than linear time.
"""

from __future__ import annotations

import re
from fractions import Fraction

# Longer final answers are none: the longest of MATH-500 has 159 characters (verl, math_dapo.py).
MAX_LENGTH = 1000
# Exact fractions of any length would take the time that a response chooses.
_MAX_NUMBER_LENGTH = 200

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011", "-"),
        **dict.fromkeys("\u00a0\u2009\u200a\u202f\u3000\t\n\r~", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "°": r"^\circ "},
        **{"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "√": r"\sqrt "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset "},
        **{"€": r"\euro ", "£": r"\pounds ", "`": ""},
    }
)
_SPELLINGS = (
    (r",\s*\\!\s*|(?<=\d)\{,\}(?=\d)", "{,}"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", ""),
    (r"\\(?:left|right|displaystyle|limits|big|Big|bigg|Bigg)(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[,!;:> ]|\\q?quad(?![a-zA-Z])", " "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\(?:mathrm|mathbf|mathit|mathsf|textbf|textit|textrm|mbox|operatorname)\s*\{", r"\\text{"),
    (r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|sec|csc|cot|ln|log|exp|pi|infty)(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s+(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\(?:leqslant|leq|lt=)(?![a-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geq)(?![a-z])|>=", r"\\ge "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\neq(?![a-z])|!=", r"\\ne "),
    (r"\\varnothing(?![a-z])", r"\\emptyset"),
    (r"\+\s*-|-\s+\+", "-"),
    (r"\s+", " "),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _SPELLINGS)

# Thousands are grouped by commas or spaces ("1,234,567"); "1,2" is two numbers.
_DECIMAL = r"(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:\{,\}\d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+"
# Exponents of at most three digits: "1e999999999" would be a number that no memory holds.
_POWER = r"(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{?([+-]?\d{1,3})\}?"
_SCIENTIFIC = re.compile(rf"([+-]?)({_DECIMAL})(?:{_POWER})?", re.ASCII)
_POWER_OF_TEN = re.compile(r"([+-]?)10\^(?:\{([+-]?\d{1,3})\}|(\d))", re.ASCII)
_QUOTIENT = re.compile(rf"([+-]?)(?:\\frac\{{([+-]?)({_DECIMAL})\}}\{{([+-]?)({_DECIMAL})\}})", re.ASCII)
_SLASH = re.compile(rf"([+-]?)()({_DECIMAL})/\(?([+-]?)({_DECIMAL})\)?", re.ASCII)
_MIXED = re.compile(r"([+-]?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))", re.ASCII)


def clean(text: str) -> str:
    """Return an answer in one spelling: without mathematics' delimiters, sizes and spacing; "\\tfrac" is "\\frac".

    Args:
        text: Of any length; more than `MAX_LENGTH` characters are no answer.

    Returns:
        The spelling, empty for no answer.
    """
    if len(text) > MAX_LENGTH or any(ord(letter) < 9 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        return ""
    plain = text.translate(_CHARACTERS).strip().strip("*").replace("**", "^")
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


# Shortened units, and the word they stand for.
_UNITS = {
    **{"mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "ft": "foot"},
    **{"feet": "foot", "inches": "inch", "mi": "mile", "yd": "yard", "mg": "milligram", "g": "gram", "kg": "kilogram"},
    **{"lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "milliliter", "l": "liter", "s": "second", "sec": "second"},
    **{"min": "minute", "h": "hour", "hr": "hour", "mph": "mile per hour", "km/h": "kilometer per hour"},
    **{"pct": "%", "percent": "%", "percentage": "%", "usd": "dollar", "deg": "degree"},
}
_NOT_UNITS = {"and", "or", "to", "theta", "alpha", "beta", "gamma", "delta", "infinity", "mod", "max", "min", "base"}
_SIGNS = (
    (re.compile(r"^(-?) ?\\\$ ?"), r"\1", "dollar"),
    (re.compile(r"^(-?) ?\\euro ?"), r"\1", "euro"),
    (re.compile(r"^(-?) ?\\pounds ?"), r"\1", "pound sterling"),
    (re.compile(r" ?\\euro$"), "", "euro"),
    (re.compile(r" ?\\\$$"), "", "dollar"),
    (re.compile(r" ?\\?%$"), "", "%"),
    (re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degrees?)$"), "", "degree"),
)
_TEXT_UNIT = re.compile(r"\\text\{([^{}]*)\}(?: ?\^ ?\{?([23])\}?)?$")
_WORD_UNIT = re.compile(r"(?<=[\d}) ])((?:[A-Za-z]+(?:/[A-Za-z]+)?)(?: [A-Za-z]+){0,3})(?: ?\^ ?\{?([23])\}?)?$")
_BASE = re.compile(r"^(\d+)_(?:\{(\d{1,2})\}|(\d{1,2}))$", re.ASCII)


def split_unit(text: str) -> tuple[str, str]:
    """Return (quantity, unit): ("5", "centimeter") of "5 \\text{ cm}", ("52", "base 8") of "52_8"; "" for no unit."""
    if base := _BASE.match(squeeze(text)):
        return base[1], f"base {base[2] or base[3]}"
    for pattern, rest, unit in _SIGNS:
        if pattern.search(text) and (quantity := pattern.sub(rest, text).strip()):
            return quantity, unit
    for pattern in (_TEXT_UNIT, _WORD_UNIT):
        found = pattern.search(text)
        quantity = text[: found.start()].strip() if found else ""
        if found and re.search(r"\d|\\[a-z]", quantity) and (pattern is _TEXT_UNIT or _is_unit(found[1])):
            return quantity, unit_name(found[1]) + (f"^{found[2]}" if found[2] else "")
    return text, ""


def unit_name(text: str) -> str:
    """Return a unit by one name, in lower case and singular."""
    words = text.strip(" .").lower()
    name = _UNITS.get(words, words)
    return name[:-1] if name.endswith("s") and len(name) > 3 else name


def _is_unit(words: str) -> bool:
    """Tell a unit from a product of letters: a word has three letters and a vowel, or is known."""
    return all(
        word.lower() in _UNITS or (len(word) > 2 and bool(set("aeiou") & set(word)) and word not in _NOT_UNITS)
        for word in words.split()
    )


def words_of(text: str) -> str | None:
    """Return words in lower case, without "\\text"; None for what may be mathematics, single letters included."""
    is_marked = r"\text{" in text
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    if not re.fullmatch(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*", re.sub(r" +", " ", plain)):
        return None
    plain = re.sub(r" +", " ", plain).lower()
    is_word = len(plain) > 1 if is_marked else len(plain) > 2 and bool(set("aeiouy") & set(plain))
    return plain if is_word or not plain.isascii() else None

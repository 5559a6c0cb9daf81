"""How answers in mathematics are written: one spelling for many, plain numbers, units, words.

Only text: the values of expressions are in `expression`. Every step takes at most moments for `MAX_LENGTH` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

# The longest final answer of MATH-500 has 159 characters (verl, math_dapo.py); longer texts are not answers.
MAX_LENGTH = 1000
MAX_DEPTH = 12
# Exact fractions of any length would take as much time as a response chooses.
_MAX_NUMBER_LENGTH = 200

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011", "-"),
        **dict.fromkeys("\u00a0\u2009\u200a\u202f\u3000\t\n\r~", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "°": r"^\circ "},
        **{"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "√": r"\sqrt "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∈": r"\in ", "∅": r"\emptyset "},
        **{"€": r"\euro ", "£": r"\pounds ", "ℝ": r"\mathbb{R}", "⟨": r"\langle ", "⟩": r"\rangle "},
    }
)
_COMMANDS = {
    **dict.fromkeys(["left", "right", "displaystyle", "limits", "bf", "rm", "it", "big", "Big", "bigg", "Bigg"], ""),
    **{"quad": " ", "qquad": " ", "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom"},
    **{"tbinom": r"\binom", "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ", "geqslant": r"\ge ", "neq": r"\ne "},
    **{"lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "varnothing": r"\emptyset", "lg": r"\log ", "vert": "|"},
    **{"lvert": "|", "rvert": "|", "cup": "∪", "cap": "∩", "setminus": "∖", "backslash": "∖", "R": r"\mathbb{R}"},
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FUNCTIONS = "sqrt|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|exp"
_STYLE = (
    r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|text(?:bf|it|rm|sf|tt)?|mbox|operatorname|emph)(?![a-zA-Z])\s*"
)
NUMERAL = r"(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:\{,\}\d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<!\\)\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0])),
    (r",\s*\\!\s*|(?<=\d)\{,\}(?=\d)", "{,}"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", ""),
    (r"(?<!\\)\\[,!;:> ]", " "),
    (r"\\(?:text)?color\{[^{}]*\}|\\(?:underline|boxed|fbox)(?=\{)", ""),
    (rf"{_STYLE}\{{\s*({_FUNCTIONS}|gcd|lcm)\s*\}}", r"\\\1 "),
    # A style says nothing, so its content stays as it is, signs included; words stay marked as words, and so does a
    # letter behind a space: the unit of "5\text{ m}".
    (rf"{_STYLE}\{{(?=[^{{}}\\\d=<>+*^$]*[^\W\d_]{{2}}[^{{}}\\\d=<>+*^$]*\}}| +[A-Za-z] *\}})", r"\\words{"),
    (_STYLE, ""),
    (r"\\words", r"\\text"),
    (r"(\\(?:frac|binom)) *([0-9a-zA-Z])", r"\1{\2}"),
    (rf"(\\(?:frac|binom) *{_GROUP}) *([0-9a-zA-Z])", r"\1{\2}"),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|infty)(?![A-Za-z])", r"\\\1"),
    (r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])", r"\\infty"),
    (r"\\sqrt\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
    (r"\\log_(?:e|\{e\})", r"\\ln "),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=|\\not ?=", r"\\ne "),
    (r"\\(?:mathbb|Bbb) ?\{?([A-Z])\}?", r"\\mathbb{\1}"),
    (r"^(?:\\text\{ ?)?all real(?:s| numbers) ?\}?$", r"\\mathbb{R}"),
    (r"(?<=\\mathbb\{R\}) ?-", "∖"),
    (r"^(?:\\text\{ ?)?(?i:the |final |correct )*(?i:answer)(?: is|:|=)+ ?\}?:? *(?=.)|^\\approx(?![a-z])", ""),
    (r"\\\{ *\\\}", r"\\emptyset"),
    # 0.1\overline{6}, 0.\dot{3} and 0.(3) are fractions, which math-verify cannot read.
    (r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{|\()(\d+)[)}]", lambda m: _recurring(*m.groups())),
    (r"^(?:negative|minus) (?=[\d\\])", "-"),
    (r"^(-?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (rf"(?<![\w.,])({NUMERAL}) ?(\\text\{{ ?)?({'|'.join(_SCALES)})(?![a-z])", lambda m: _scaled(*m.groups(""))),
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
_NUMBER = re.compile(
    rf"([+-]?)({NUMERAL})(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{{?([+-]?\d{{1,3}})\}}?|/({NUMERAL}))?", re.ASCII
)


def clean(text: str) -> str:
    """Return an answer in one spelling: without delimiters of mathematics, styles, sizes and spacing.

    Texts of more than `MAX_LENGTH` characters, or of brackets in more than `MAX_DEPTH` brackets, are no answers: "".
    """
    if len(text) > MAX_LENGTH or any(ord(letter) < 9 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        return ""
    plain = _EMPHASIS.sub(r"\2", text.translate(_CHARACTERS).strip()).replace("**", "^")
    for pattern, spelling in _COMPILED:
        plain = pattern.sub(spelling, plain)
    if max(depths(plain), default=0) > MAX_DEPTH:
        return ""
    return plain.strip().lstrip("=;,: ").rstrip(" .;,:").removeprefix("+").strip()


def depths(text: str) -> list[int]:
    """Return how many brackets of any kind are open behind each character."""
    return list(accumulate((letter in "([{") - (letter in ")]}") for letter in text))


def squeeze(text: str) -> str:
    """Return text without the white space that says nothing: "4 2" stays two numbers, a command keeps its end."""
    return re.sub(r"(\\[a-zA-Z]+ (?=[a-zA-Z])|\d (?=\d))| ", r"\1", text)


def number(text: str) -> Fraction | None:
    """Return the exact value of a plain number: "-1,234", "3.50", "2/3", "3 \\times 10^5", "1e-3"; None for others."""
    found = _NUMBER.fullmatch(squeeze(text)) if len(text) <= _MAX_NUMBER_LENGTH else None
    if found is None or (divisor := _decimal(found[4] or "1")) == 0:
        return None
    value = _decimal(found[2]) * Fraction(10) ** int(found[3] or 0) / divisor
    return -value if found[1] == "-" else value


def _decimal(digits: str) -> Fraction:
    plain = re.sub(r"[ ,{}]", "", digits)
    return Fraction(f"0{plain}0" if "." in plain else plain)


def _plain(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scaled(digits: str, marked: str, scale: str) -> str:
    return _plain(_decimal(digits) * _SCALES[scale]) + marked


def _recurring(whole: str, once: str, again: str) -> str:
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
    if found and re.search(r"\d|\\[a-z]", quantity) and _is_unit(found[1], found[2]):
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


def _is_unit(marked: str | None, words: str | None) -> bool:
    """Tell a unit from a product of letters: a word that is not marked has three letters and a vowel, or is known."""
    return not _NOT_UNITS & set((marked or words or "").split()) and all(
        word.lower() in _UNITS or (len(word) > 2 and bool(set("aeiou") & set(word)))
        for word in re.split("[ /]", words or "h")
    )


def words_of(text: str) -> str | None:
    """Return words in lower case, without "\\text"; None for what may be mathematics, single letters included."""
    plain = re.sub(r" +", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip(" .")
    if not re.fullmatch(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*", plain):
        return None
    is_word = len(plain) > 1 if r"\text{" in text else len(plain) > 2 and bool(set("aeiouy") & set(plain.lower()))
    return plain.lower() if is_word or not plain.isascii() else None

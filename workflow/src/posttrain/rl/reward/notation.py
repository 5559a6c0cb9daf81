"""How answers in mathematics are written: one spelling for many, plain numbers, units, words.

Only text: the values of expressions are in `expression`. Every step takes at most moments for `MAX_LENGTH` characters.
A sign of structure becomes one character, however it was written: ⦃⦄ for a set, ≤, ∪, ∈, ∨ for "or", ∧ for "and".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import accumulate

# The longest final answer of MATH-500 has 159 characters (verl, math_dapo.py); longer texts are not answers.
MAX_LENGTH = 1000
MAX_DEPTH = 12

# What is not a compatibility character of Unicode, or means more than it: ² is no 2.
_CHARACTERS = str.maketrans(
    {
        **{"\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2044": "/", "~": " ", "\t": " ", "\n": " ", "\r": " "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "°": r"^\circ "},
        **{"π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "√": r"\sqrt ", "€": r"\euro "},
        **{"£": r"\pounds ", "∅": "⦃⦄", "ℝ": "(-∞,∞)"},
    }
)
# Commands of LaTeX without their backslash, and signs of two characters.
_TOKENS = {
    **dict.fromkeys(["left", "right", "displaystyle", "limits", "bf", "rm", "it", "big", "Big", "bigg", "Bigg"], ""),
    **{**dict.fromkeys("()[]", ""), **dict.fromkeys(",;:!> ", " "), "quad": " ", "qquad": " "},
    **{"dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom"},
    **{"lt": "<", "le": "≤", "leq": "≤", "leqslant": "≤", "<=": "≤", "ne": "≠", "neq": "≠", "!=": "≠"},
    **{"gt": ">", "ge": "≥", "geq": "≥", "geqslant": "≥", ">=": "≥", "in": "∈", "pm": "±", "approx": "≈", "**": "^"},
    **{"{": "⦃", "}": "⦄", "lbrace": "⦃", "rbrace": "⦄", "langle": "⟨", "rangle": "⟩", "infty": "∞", "R": "(-∞,∞)"},
    **{"emptyset": "⦃⦄", "varnothing": "⦃⦄", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "lg": r"\log "},
    **{"cup": "∪", "cap": "∩", "setminus": "∖", "backslash": "∖", "lor": "∨", "vee": "∨", "land": "∧", "wedge": "∧"},
}
_SCALES = {
    **{"hundred": r"\cdot 10^{2}", "thousand": r"\cdot 10^{3}", "million": r"\cdot 10^{6}"},
    **{"billion": r"\cdot 10^{9}", "trillion": r"\cdot 10^{12}"},
}
_FUNCTIONS = "sqrt|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|exp"
_STYLE = (
    r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|text(?:bf|it|rm|sf|tt)?|mbox|operatorname|emph)(?![a-zA-Z])\s*"
)
_PROSE = r"[^{}\\\d=<>+*^$]*"
# Words stay marked as words, and so does a letter behind a space: the unit of "5\text{ m}".
_WORDS = rf"\{{(?={_PROSE}[^\W\d_]\.?[^\W\d_]{_PROSE}\}}| +[A-Za-z] *\}})"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^([*_]{1,3}|`+)(.*)\1$", r"\2"),
    (r"(?<=\d)(?:,\s*\\!\s*|\{,\})(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\(?:[a-zA-Z]+|[^a-zA-Z\\])|[<>!]=|\*\*", lambda m: _TOKENS.get(m[0].removeprefix("\\"), m[0])),
    (r"(?<!\\)\$|\\(?:text)?color\{[^{}]*\}|\\(?:underline|boxed|fbox)(?=\{)", ""),
    (rf"{_STYLE}\{{\s*({_FUNCTIONS}|gcd|lcm)\s*\}}", r"\\\1 "),
    # Another style says nothing, so its content stays as it is, signs included.
    (rf"{_STYLE}({_WORDS})?", lambda m: r"\text{" if m[1] else ""),
    (r",? ?(?:\\text\{[ ,]*(?:or|and) *\}|(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z]))", lambda m: "∧∨"["or" in m[0]]),
    (r"(\\(?:frac|binom|mathbb)) *([0-9a-zA-Z])", r"\1{\2}"),
    (rf"(\\(?:frac|binom) *{_GROUP}) *([0-9a-zA-Z])", r"\1{\2}"),
    (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi)(?![A-Za-z])", r"\\\1"),
    (r"(?<![\\A-Za-z])(?:infinity|infty|oo)(?![A-Za-z])", "∞"),
    (r"\\sqrt\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
    (r"\\log_(?:e|\{e\})", r"\\ln "),
    (r"\\(?:mathbb|Bbb) ?\{R\}|^(?:\\text\{ ?)?all real(?:s| numbers) ?\}?$", "(-∞,∞)"),
    (r"(?<=\(-∞,∞\)) ?-", "∖"),
    (r"^(?:\\text\{ ?)?(?i:the |final |correct )*(?i:answer)(?: is|:|=)+ ?\}?:? *(?=.)|^≈", ""),
    # What is exact stands before ≈, unless it is only a name.
    (r"(?<![^,;∨∧ ])([A-Za-z](?:_\w+)?) ?≈", r"\1="),
    (r"≈[^,;∨∧]*", ""),
    # 0.1\overline{6}, 0.\dot{3} and 0.(3) are fractions, which math-verify cannot read.
    (r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{|\()(\d+)[)}]", lambda m: _recurring(*m.groups())),
    (r"^(?:negative|minus) (?=[\d\\])", "-"),
    (r"^(-?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.,])\d{1,3}(?: \d{3})+(?![\w,])", lambda m: m[0].replace(" ", "")),
    (rf"(?<=\d) ?(\\text\{{ ?)?({'|'.join(_SCALES)})(?![a-z])", lambda m: _SCALES[m[2]] + (m[1] or "")),
    (r"(?<!\w)(\d+)_(?:\{(\d{1,2})\}|(\d{1,2}))(?!\w)", r"\1\\text{ base \2\3}"),
    # {x : x > 2} says x > 2.
    (r"⦃ ?[a-zA-Z](?: ?∈[^:|⦃⦄]*?)? ?[:|] ?([^⦃⦄]*)⦄", r"\1"),
    # A group that is no argument prints as what it holds.
    (r"(?<![a-zA-Z}\]_^\\])\{([^{},\\]*)\}", r"\1"),
    (r"\\text\{[ .]*\}", ""),
    (r"^([A-Z])\)$", r"\1"),
    (r"\s+", " "),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _SPELLINGS)


def clean(text: str) -> str:
    """Return an answer in one spelling: without delimiters of mathematics, styles, sizes and spacing.

    Texts of more than `MAX_LENGTH` characters, or of brackets in more than `MAX_DEPTH` brackets, are no answers: "".
    """
    plain = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).strip() if len(text) <= MAX_LENGTH else ""
    is_long = len(plain) > MAX_LENGTH or max(depths(plain), default=0) > MAX_DEPTH
    if is_long or re.search("[\x00-\x08\ud800-\udfff]", plain):
        return ""
    for pattern, spelling in _COMPILED:
        plain = pattern.sub(spelling, plain)
    return plain.lstrip("=;,: ").rstrip(" .;,:").removeprefix("+").strip()


def depths(text: str) -> list[int]:
    """Return how many brackets of any kind are open behind each character."""
    return list(accumulate((letter in "([{⦃⟨") - (letter in ")]}⦄⟩") for letter in text))


def squeeze(text: str) -> str:
    """Return text without marks of words and the white space that says nothing: "4 2" stays two numbers."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(\\[a-zA-Z]+ (?=[a-zA-Z])|\d (?=\d))| ", r"\1", plain)


def _recurring(whole: str, once: str, again: str) -> str:
    """Return 0.1\\overline{6} as (16 - 1) / 90."""
    numerator = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(again)}{'0' * len(once)}}}"


# Short and irregular names of units -> the unit, in the singular.
_UNITS = {
    **{"mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "inche": "inch"},
    **{"ft": "foot", "feet": "foot", "mi": "mile", "yd": "yard", "mg": "milligram", "g": "gram", "kg": "kilogram"},
    **{"lb": "pound", "oz": "ounce", "ml": "milliliter", "l": "liter", "s": "second", "sec": "second"},
    **{"min": "minute", "h": "hour", "hr": "hour", "mph": "mile/hour", "deg": "degree", "am": "am", "pm": "pm"},
    **{"pct": "%", "percent": "%", "percentage": "%", "usd": "dollar", "$": "dollar"},
}
_NO_UNIT = (
    r"\b(?:to|dozen|theta|alpha|beta|gamma|delta|mod|not|factorial|half|squared|cubed|plus|minus|times|over|more|less|"
    r"than|divided)\b"
)
# A unit and not a product of letters: a word that is not marked has three letters and a vowel, or is known.
_NAMED = rf"(?!{_NO_UNIT})(?:(?i:{'|'.join(filter(str.isalpha, _UNITS))})s?|(?=[a-zA-Z]*[aeiou])[a-zA-Z]{{3,}})(?!\w)"
_UNIT = re.compile(
    rf"(?:\\text\{{(?![^{{}}]*{_NO_UNIT})([^{{}}]*)\}}|(\\\$|\\euro|\\pounds|\\?%)|"
    rf"(?<=[\d}}) ])({_NAMED}(?:[/ ]{_NAMED}){{0,4}}))(?: ?\^ ?\{{?([23])\}}?)?$"
)
_CURRENCY = re.compile(r"^(-?) ?(\\\$|\\euro|\\pounds) ?(.+)")
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degrees?) ?\{?([CF]?)\}?")


def split_unit(text: str) -> tuple[str, str]:
    """Return (quantity, unit): ("5", "centimeter") of "5 \\text{ cm}", ("5", "dollar") of "\\$5"; "" for no unit."""
    text = _CURRENCY.sub(r"\1\3\2", text)
    if degrees := _DEGREES.search(text):
        text = _DEGREES.sub("", text) + rf"\text{{ degree{degrees[1]}}}"
    found = _UNIT.search(text)
    quantity = text[: found.start()].strip() if found else ""
    if not found or not re.search(r"\d|\\[a-z]", quantity):
        return text, ""
    return quantity, unit_name(found[1] or found[2] or found[3]) + (f"^{found[4]}" if found[4] else "")


def unit_name(text: str) -> str:
    """Return a unit by one name, in lower case and singular: "square cm" is "centimeter^2"."""
    plain = re.sub(r"[.\\]", "", text.lower()).strip().replace(" per ", "/")
    plain = re.sub("cubic ([a-z]+)", r"\1^3", re.sub("(?:square|sq) ([a-z]+)", r"\1^2", plain))
    return re.sub("([a-z][a-z]+?|[a-z$])s?(?![a-z])", lambda word: _UNITS.get(word[1], word[1]), plain)


def words_of(text: str) -> str | None:
    """Return words in lower case, without "\\text"; None for what may be mathematics, single letters included."""
    plain = re.sub(r" +", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip(" .")
    if not re.fullmatch(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*", plain):
        return None
    is_word = len(plain) > 1 if r"\text{" in text else len(plain) > 2 and bool(set("aeiouy") & set(plain.lower()))
    return plain.lower() if is_word or not plain.isascii() else None

"""Text graders: exact match, multiple choice, word F1."""

from __future__ import annotations

import re
import string
from collections import Counter

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.mathematics import last_boxed, last_match, without_markup

_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}|\$|\\[()\[\] ,]")
_REJECTED = r"(?! (?:is|was|can)(?:n['\u2019]t|['\u2019]t| ?not| never| wrong| incorrect| false)\b)"
# A single stand-alone letter; "a" and "I" are words if another, non-explanatory word follows.
_LETTER = (
    rf"[(\[{{]?([A-Z])(?:[)\]}}]|(?![\w'\u2019])){_REJECTED}(?! *(?:and|or|,|/|&) *[(\[]?(?-i:[A-Z])\b)"
    r"(?:(?<![aAI])|(?! +(?!because|since|as|which|so|for|due|given|is|by|with|and|but|not)[a-z]))"
)
_IS = (
    r"(?: would| must| should| has to)? ?(?:is|be|was|:|=)[\s:]*(?:(?:option|choice|letter|clearly|therefore|thus)\s+)*"
)
_STATED = re.compile(
    rf"(?:answer|(?:correct|right|best) (?:option|choice|one))(?: (?:to|for) [^\n.:]{{0,60}}?)?\s*{_IS}{_LETTER}"
    r"|(?:\b|\()([A-Z])\)? is (?:the )?(?:correct|right|best|answer)",
    re.IGNORECASE,
)
_BRACKETED = re.compile(rf"(?<!not )\(([A-Z])\){_REJECTED}")
_CHOSEN = re.compile(rf"\b(?:option|choice|choose|chose|pick|select|go with):? +{_LETTER}", re.IGNORECASE)
_ALONE = re.compile(r"[\s#*(]*([A-Z])[\s*).:]*", re.IGNORECASE)
_LABELLED = re.compile(rf"\s*(?:\(([A-Z])\)|([A-Z])[).:]){_REJECTED}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(answer: Answer) -> float:
    """Return 1.0 if the stripped response is the label, or one of a list of labels."""
    return float(answer.text.strip() in [label.strip() for label in _texts(answer.label)])


def choice(answer: Answer) -> float:
    """Return 1.0 if the response's letter is the label's.

    The letter is taken from a box, else from the last "the answer is", else the last "(B)", else the last choice
    ("option B"), else a letter alone on the last line or at the start of the response ("B. Paris"). The label is a
    letter ("B", "(B)") or an index from 0.
    """
    wanted = answer.label
    if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(string.ascii_uppercase):
        wanted = string.ascii_uppercase[wanted]
    expected = _ALONE.fullmatch(str(wanted))
    if expected is None:
        raise ValueError(f"no label for a choice: {answer.label!r}; allowed are a letter and an index from 0")
    return float(_stated_letter(answer.text) == expected[1].upper())


def f1(answer: Answer) -> float:
    """Return the word F1 with the best-matching label, 0.0 to 1.0.

    Words are compared as in SQuAD's evaluation (Rajpurkar et al. 2016, arXiv:1606.05250): in lower case, without
    punctuation and articles. If a side has no words, it is 1.0 if neither has, else 0.0.
    """
    return max((_f1(_words(answer.text), _words(label)) for label in _texts(answer.label)), default=0.0)


def _texts(label: object) -> list[str]:
    return [str(one) for one in label] if isinstance(label, (list, tuple)) else [str(label)]


def _stated_letter(text: str) -> str | None:
    boxed = last_boxed(text)
    plain = _STYLE.sub(r"\1", without_markup(text) if boxed is None else boxed).strip()
    patterns = (_STATED, _BRACKETED, _CHOSEN) if boxed is None else ()
    found = next((last for pattern in patterns if (last := last_match(pattern, plain))), None)
    found = found or _ALONE.fullmatch(plain.rpartition("\n")[2]) or _LABELLED.match(plain)
    return next(filter(None, found.groups())).upper() if found else None


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))

"""Graders of text: the same text, a multiple choice, the words in common."""

from __future__ import annotations

import re
import string
from collections import Counter

from posttrain.reward.answer import Answer
from posttrain.reward.mathematics import last_boxed

_STATED = re.compile(r"(?:answer|option|choice)\**\s*(?:is|:)?[\s:*]*\(?([A-Z])\)?(?![\w'])", re.IGNORECASE)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_ALONE = re.compile(r"[\s*(]*([A-Z])[\s*).:]*", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A choice is stated at the end.
_TAIL = 10_000


def exact_match(answer: Answer) -> float:
    """Return 1.0 when the response is the label, or one of a list of labels, white space at both ends apart."""
    return float(answer.text.strip() in [label.strip() for label in _texts(answer.label)])


def choice(answer: Answer) -> float:
    """Return 1.0 when the last letter that the response states is the label's.

    A letter is stated in a box, else by "answer: B", else as "(B)", else by a response that is the letter alone.
    The label is a letter ("B", "(B)") or an index from 0.
    """
    wanted = answer.label
    if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(string.ascii_uppercase):
        wanted = string.ascii_uppercase[wanted]
    expected = _ALONE.fullmatch(str(wanted))
    if expected is None:
        raise ValueError(f"no label for a choice: {answer.label!r}; allowed are a letter and an index from 0")
    return float(_stated_letter(answer.text[-_TAIL:]) == expected[1].upper())


def f1(answer: Answer) -> float:
    """Return the F1 of words in common, 0.0 to 1.0, with the best of the labels.

    Words are compared as SQuAD's evaluation does (Rajpurkar et al. 2016, arXiv:1606.05250): in lower case, without
    punctuation and articles. Without words on either side it is 1.0 where both have none.
    """
    return max((_f1(_words(answer.text), _words(label)) for label in _texts(answer.label)), default=0.0)


def _texts(label: object) -> list[str]:
    return [str(one) for one in label] if isinstance(label, (list, tuple)) else [str(label)]


def _stated_letter(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        plain = re.sub(r"\\text(?:bf|rm)?\{([^{}]*)\}", r"\1", boxed)
        found = _ALONE.fullmatch(plain) or re.match(r"\s*\(?([A-Z])[).:]", plain)
        return found[1].upper() if found else None
    for pattern in (_STATED, _BRACKETED):
        if letters := pattern.findall(text):
            return str(letters[-1]).upper()
    alone = _ALONE.fullmatch(text)
    return alone[1].upper() if alone else None


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))

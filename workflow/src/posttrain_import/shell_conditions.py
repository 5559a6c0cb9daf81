"""Evaluates bash's conditions `[ ... ]` and `[[ ... ]]` to true, false or unknown."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Sequence

from posttrain_import.script import Word
from posttrain_import.shell_tree import Code
from posttrain_import.shell_words import Words

_NUMBERS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def condition(parts: Sequence[Code], words: Words, is_double: bool) -> bool | None:
    """Return whether a condition holds, None if unknown.

    Args:
        parts: Nodes between the brackets, or of one expression in them.
        words: Expands the condition's words.
        is_double: The condition is in double brackets.
    """
    if len(parts) == 1 and parts[0].type in ("binary_expression", "unary_expression", "parenthesized_expression"):
        inner = parts[0].parts
        return condition(inner[1:-1] if parts[0].type[0] == "p" else inner, words, is_double)
    if len(parts) == 2 and parts[0].text == "!":
        found = condition(parts[1:], words, is_double)
        return None if found is None else not found
    if len(parts) == 2 and parts[0].text in ("-n", "-z"):
        text = _text(parts[1], words, is_double)
        return None if text is None else bool(text) is (parts[0].text == "-n")
    if len(parts) == 1 and not parts[0].type.endswith("expression"):
        text = _text(parts[0], words, is_double)
        return None if text is None else bool(text)
    if len(parts) != 3:
        return None
    left, sign, right = parts[0], parts[1].text, parts[2]
    if sign in ("&&", "||"):
        sides = [condition([side], words, is_double) for side in (left, right)]
        return (sign == "||") if (sign == "||") in sides else None if None in sides else sign == "&&"
    if is_double and sign in ("==", "!=", "=") and "*" in right.text:
        found = fits(words.joined(left.text), right.text)
        return None if found is None else found is (sign != "!=")
    texts = [_text(left, words, is_double), _text(right, words, False)]
    if None in texts or re.search(r"[*?\[\\]", right.text):
        return None
    if sign in ("=", "==", "!="):
        return (texts[0] == texts[1]) is (sign != "!=")
    if sign in _NUMBERS and all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", text or "") for text in texts):
        return bool(_NUMBERS[sign](int(texts[0] or 0), int(texts[1] or 0)))
    return None


def _text(code: Code, words: Words, is_double: bool) -> str | None:
    """Return the text of one word, which is split in single brackets."""
    found = [words.joined(code.text)] if is_double else words.fields(code.text)
    return found[0].text if len(found) == 1 and not found[0].why else None


def fits(subject: Word, pattern: str) -> bool | None:
    """Return whether a text matches a pattern; None if bash and Python may differ."""
    is_plain = re.fullmatch(r"([\w.*?/-]|\[[a-z0-9-]+\])+|(\"[\w./-]*\")", pattern, re.ASCII)
    if subject.why or not is_plain or not subject.text.isascii():
        return None
    return fnmatch.fnmatchcase(subject.text, pattern.strip('"'))

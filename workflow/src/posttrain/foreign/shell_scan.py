"""Pieces of bash's words, and where quotes and expansions end: where the syntax tree differs, it is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.foreign.script import Word
from posttrain.foreign.shell_tree import Misread

PLAIN = re.compile(r"""[^\s\\$`'";&|<>()]+""")


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Args:
        text: Its characters; its spelling where they are not known.
        why: Why they are not known.
        is_quoted: It is neither split nor a pattern.
        is_split: It comes from an expansion without quotes.
        word: The item of an array that it is.
    """

    text: str
    why: str = ""
    is_quoted: bool = False
    is_split: bool = False
    word: Word | None = None


BREAK = Part(" ", is_quoted=True)


def end_of_quotes(text: str, start: int, mark: str, has_escapes: bool) -> int:
    """Return the place behind quotes that begin at `start`.

    Raises:
        Misread: They do not end.
    """
    at = start + 1
    while at < len(text):
        if text[at] == mark:
            return at + 1
        if text[at] == "\\" and has_escapes:
            at += 2
        elif mark == '"' and text[at] in "$`":
            at = max(at + 1, end_of_expansion(text, at))
        else:
            at += 1
    raise Misread("quotes do not end")


def end_of_expansion(text: str, start: int) -> int:
    """Return the place behind an expansion that begins at `start` with a dollar or a backquote.

    Raises:
        Misread: It does not end.
    """
    if text[start] == "`":
        return end_of_quotes(text, start, "`", True)
    opener = text[start + 1 : start + 2]
    if opener not in ("{", "(", "["):
        match = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]").match(text, start + 1)
        return match.end() if match else start + 1
    closer = {"{": "}", "(": ")", "[": "]"}[opener]
    at, depth = start + 2, 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'" and opener != "[":
            at = end_of_quotes(text, at, "'", False)
        elif char == '"' or (char in "$`" and text[at + 1 : at + 2] != ""):
            at = end_of_quotes(text, at, '"', True) if char == '"' else max(at + 1, end_of_expansion(text, at))
        elif char == "#" and opener == "(" and text[at - 1] in " \t\n;(":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            depth += (char == opener) - (char == closer)
            at += 1
            if not depth:
                return at
    raise Misread("an expansion does not end")


def unescaped(text: str) -> Part:
    """Return `$'text'`; of its escapes, those are followed that people use."""
    if text[1] == '"' or re.search(r"\\[^nt\\'\"]", text):
        return Part(text, f"{text} is not expanded", is_quoted=True)
    marks = {"n": "\n", "t": "\t"}
    return Part(re.sub(r"\\(.)", lambda match: marks.get(match[1], match[1]), text[2:-1]), is_quoted=True)

"""Words of bash: quotes, expansions, splitting, braces and patterns, in bash's order.

What is not known keeps its spelling and a reason. The tree gives where a word begins and ends; that quotes and brackets
inside of it end there, too, is checked here: otherwise the tree is wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from posttrain.foreign import script
from posttrain.foreign.script import MOST_WORDS, Word, too_much
from posttrain.foreign.shell_arithmetic import Arithmetic, NotComputed
from posttrain.foreign.shell_parameters import Parameters
from posttrain.foreign.shell_patterns import Pattern, pattern_of
from posttrain.foreign.shell_state import State
from posttrain.foreign.shell_tree import Misread, Unclear

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_BLANKS = " \t\n"
_PLAIN = re.compile(r"""[^\s\\$`'";&|<>()]+""")
# Lists of layers that no file is called: [0]*3+[1]*75.
_NO_FILE = re.compile(r"(\+?\[[\d, ]*\](\*\d+)?)+")


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


BREAK = Part("\n", is_quoted=True)


class Words:
    """Expands words in one state."""

    def __init__(self, shell: Shell, state: State, place: str):
        self.shell, self.state, self.place = shell, state, place
        self._parameters = Parameters(self)

    def fields(self, text: str) -> list[Word]:
        """Return the words that a word of a command becomes."""
        try:
            return [word for one in braces(text, self.shell.budget.spend) for word in self._fields(one)]
        except Unclear as error:
            return [Word(text, self.place, str(error), True)]

    def joined(self, text: str, is_quoted: bool = False, is_inner: bool = False) -> Word:
        """Return one word that is not split, such as the value of an assignment."""
        if text.startswith("~") or (not is_quoted and re.search(r"[:=]~", text)):
            return Word(text, self.place, "the home folder is known only when the script runs")
        found = self.parts(text, is_quoted, is_inner)
        # Items of an array have blanks between them where nothing is split.
        return self._word([Part(" ", is_quoted=True) if part is BREAK else part for part in found], False)

    def pattern(self, text: str) -> Pattern | None:
        """Return a pattern of text; None where it is not known."""
        parts = list(self.parts(text, is_inner=True))
        if any(part.why for part in parts) or self.state.options & {"nocasematch", "unclear"}:
            return None
        return pattern_of([(part.text, part.is_quoted) for part in parts])

    def field_marks(self, is_joined: bool = False) -> str:
        """Return the characters that end a field, of which the first joins a list.

        Raises:
            Unclear: They are not known.
        """
        if "IFS" not in self.state.variables:
            return _BLANKS
        marks = self.state.variables["IFS"].items.get(0)
        if marks is None or marks.why or (marks.text.strip(_BLANKS) and len(marks.text) > 1 and not is_joined):
            raise Unclear("the marks of IFS are not followed")
        return marks.text

    def arithmetic(self, text: str) -> int | None:
        """Return an expression's number; None where it is not known, and then what it sets is not, either."""
        expanded = self.joined(text.replace('"', ""), is_quoted=True)
        self.shell.budget.spend(len(expanded.text))
        try:
            if expanded.why:
                raise NotComputed(expanded.why)
            return Arithmetic(expanded.text, self._number, self._set_number).value()
        except NotComputed:
            for name in re.findall(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:[-+*/%&|^]|<<|>>)*(?:=(?!=)|\+\+|--)", text):
                self.shell.forget(self.state, name, f"{text.strip()} is not computed")
            for name in re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", text):
                self.shell.forget(self.state, name, f"{text.strip()} is not computed")
            return None

    def key(self, name: str, index: str) -> int | str | None:
        """Return the index or key that a subscript is; None where it is not known."""
        return self._parameters.key(name, index)

    def _number(self, name: str) -> str:
        word = self.joined(f"${{{name}}}")
        if word.why:
            raise NotComputed(word.why)
        return word.text

    def _set_number(self, name: str, value: int) -> None:
        self.shell.assign(self.state, name, Word(str(value), self.place))

    # ---- parts ----

    def parts(self, text: str, is_quoted: bool = False, is_inner: bool = False) -> Iterator[Part]:
        """Yield the pieces of a word.

        Args:
            text: As it is spelled.
            is_quoted: It stands in double quotes.
            is_inner: It stands in braces, where blanks end no word.

        Raises:
            Misread: Bash would end the word earlier or later.
        """
        self.shell.budget.spend(1 + len(text))
        at = 0
        while at < len(text):
            char = text[at]
            start, at = at, at + 1
            if char == "\\":
                at += 1
                escaped = text[start + 1 : at]
                if escaped == "\n":
                    continue
                is_kept = is_quoted and escaped not in '$`"\\' if escaped else True
                yield Part(f"\\{escaped}" if is_kept else escaped, is_quoted=True)
            elif char == "$" and text[at : at + 1] == "'" and not is_quoted:
                at = end_of_quotes(text, at, "'", True)
                yield Part(_ansi(text[start + 2 : at - 1]), is_quoted=True)
            elif char in "$`":
                end = end_of_expansion(text, start)
                if end == at and char == "$":
                    if text[at : at + 1] != '"' or is_quoted:
                        yield Part("$", is_quoted=is_quoted)
                    continue
                at = end
                yield from self._expansion(text[start:at], is_quoted)
            elif char == "'" and not is_quoted:
                at = end_of_quotes(text, start, "'", False)
                yield Part(text[start + 1 : at - 1], is_quoted=True)
            elif char == '"' and not is_quoted:
                at = end_of_quotes(text, start, '"', True)
                inner = text[start + 1 : at - 1]
                found = list(self.parts(inner, True))
                # Quotes without characters are a word, but for a list without items.
                yield from found or ([] if "@" in inner else [Part("", is_quoted=True)])
            elif char == '"' and is_inner:
                continue
            elif not is_quoted and not is_inner and char in " \t\n;&|<>()":
                if char in "<>" and text[at : at + 1] == "(":
                    yield Part(text, f"{text} is the output of a command, and none is run", is_split=True)
                    return
                raise Misread("a word ends elsewhere")
            else:
                run = _PLAIN.match(text, start)
                at = run.end() if run else at
                yield Part(text[start:at], is_quoted=is_quoted)

    def _expansion(self, text: str, is_quoted: bool) -> Iterator[Part]:
        if (text.startswith("$((") and text.endswith("))")) or text.startswith("$["):
            inner = text[3:-2] if text.startswith("$((") else text[2:-1]
            found = self.arithmetic(inner)
            why = f"{text} is not computed" if found is None else ""
            yield Part(text if why else str(found), why, is_quoted, not (is_quoted or why))
        elif text.startswith("$(") or text.startswith("`"):
            inner = text[2:-1] if text[0] == "$" else re.sub(r"\\([\\`$])", r"\1", text[1:-1])
            output = self.shell.substitute(self.state, inner, self.place)
            why = f"{text} is the output of a command, and none is run" if output is None else ""
            yield Part(text if output is None else output, why, is_quoted, not is_quoted)
        else:
            yield from self._parameters.expand(text, is_quoted)

    # ---- from parts to words ----

    def _fields(self, text: str) -> Iterator[Word]:
        if text.startswith("~"):
            yield Word(text, self.place, "the home folder is known only when the script runs")
            return
        current: list[Part] | None = None
        for part in self.parts(text):
            self.shell.budget.spend(1 + len(part.text))
            if part is BREAK:
                if current:
                    yield self._word(current)
                current = None
            elif part.is_split and not part.why:
                marks = self.field_marks()
                is_blank = not marks.strip(_BLANKS)
                pieces = re.split(f"[{marks}]+", part.text) if is_blank and marks else [part.text]
                if not is_blank:
                    pieces = part.text.removesuffix(marks).split(marks)
                    if "" in pieces or part.text.endswith(marks):
                        raise Unclear("empty fields are not followed")
                for index, piece in enumerate(pieces):
                    if index and current:
                        yield self._word(current)
                    if index:
                        current = None
                    if piece:
                        word = part.word if part.word and piece == part.text else None
                        current = [*(current or []), replace(part, text=piece, word=word)]
            elif part.text or part.is_quoted:
                current = [*(current or []), part]
        if current:
            yield self._word(current)

    def _word(self, parts: Sequence[Part], is_field: bool = True) -> Word:
        if len(parts) == 1 and parts[0].word and is_field:
            return parts[0].word
        text = "".join(part.text for part in parts)
        if len(text) > script.MOST_CHARACTERS:
            raise too_much(f"a word is longer than {script.MOST_CHARACTERS} characters")
        why = next((part.why for part in parts if part.why), "")
        is_list = any(part.why and part.is_split for part in parts)
        bare = "".join(part.text for part in parts if not part.is_quoted and not part.why)
        has_pattern = is_field and re.search(r"[*?]|\[.*\]", bare, re.DOTALL) and "noglob" not in self.state.options
        if not why and has_pattern and not _NO_FILE.fullmatch(text):
            why = "which files it names is known only when the script runs"
        return Word(text, self.place, why, is_list)


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
    """Return the place behind an expansion that begins at `start` with a dollar or a backquote."""
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


def braces(text: str, spend: object) -> list[str]:
    """Return what `{a,b}` and `{1..3}` make of a word."""
    start = 0
    while "{" in text[start:]:
        start, end, commas = _first_braces(text, start)
        if end < 0:
            break
        inner = text[start + 1 : end]
        choices: Iterable[str]
        if commas:
            edges = [start, *commas, end]
            choices = [text[one + 1 : two] for one, two in itertools.pairwise(edges)]
        elif numbers := re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?", inner):
            choices = _numbers(*numbers.groups())
        elif letters := re.fullmatch(r"([a-zA-Z])\.\.([a-zA-Z])", inner):
            choices = map(chr, map(int, _numbers(str(ord(letters[1])), str(ord(letters[2])), None)))
        else:
            start += 1
            continue
        rests = braces(text[end + 1 :], spend)
        found = [
            f"{text[:start]}{inner}{rest}" for choice in choices for inner in braces(choice, spend) for rest in rests
        ]
        spend(len(found) * (1 + len(text)))  # type: ignore[operator]
        return found
    return [text]


def _first_braces(text: str, at: int) -> tuple[int, int, list[int]]:
    """Return where the next braces without quotes begin and end, and where their commas are."""
    opened: list[tuple[int, list[int]]] = []
    is_nested = False
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            at = end_of_quotes(text, at, char, char == '"') - 1
        elif char == "$" and text[at + 1 : at + 2] == "'":
            at = end_of_quotes(text, at + 1, "'", True) - 1
        elif char in "$`":
            at = max(at, end_of_expansion(text, at) - 1)
        elif char == "{":
            opened.append((at, []))
        elif char == "," and opened:
            opened[-1][1].append(at)
        elif char == "}" and opened:
            start, commas = opened.pop()
            if not opened:
                return start, at, commas
            is_nested = True
        at += 1
    if opened and is_nested:
        raise Unclear("braces that do not end are not followed")
    return -1, -1, []


def _numbers(first: str, last: str, step: str | None) -> list[str]:
    low, high, by = int(first), int(last), abs(int(step or 1)) or 1
    if abs(high - low) // by > MOST_WORDS:
        raise too_much(f"it has more than {MOST_WORDS} words")
    width = max(len(first), len(last)) if any(re.match(r"-?0\d", side) for side in (first, last)) else 0
    found = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    return [f"{number:0{width}d}" if width else str(number) for number in found]


def _ansi(text: str) -> str:
    if re.search(r"\\[0-9xuUc]", text):
        raise Unclear("characters by their number are not followed")
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1] if match[1] in "\\'\"?" else match[0]), text)

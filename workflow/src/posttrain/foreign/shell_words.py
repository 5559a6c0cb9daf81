"""Words of a bash script, with what expands in them. Nothing is expanded here.

`shlex` alone would take '$X' for "$X", a `#` inside a word for a comment, and tell no line of a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Deeper than a person nests ${A:-${B:-...}}.
DEEPEST = 20
_ASSIGNS = re.compile(r"\w+\+?=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_PLAIN = re.compile(r"""[^\s\\'"$`;&|()<>]+""")
_BLANK = re.compile(r"[ \t\r]+")
# Where output goes is no word of the command.
_REDIRECTS = re.compile(r"\d*(?:&>>?|[<>]{1,2}&?)[ \t]*[^\s;&|()<>]*")


@dataclass(frozen=True)
class Piece:
    """A part of a word.

    Args:
        text: As it is spelled.
        kind: "text"; "variable"; "arithmetic"; "command", which would have to be run; "other" expansions.
        name: Of a variable.
        default: Pieces that stand for a variable that is not set; None: there are none.
        is_quoted: It stays one word.
        is_array: All items of an array.
    """

    text: str
    kind: str = "text"
    name: str = ""
    default: tuple[Piece, ...] | None = None
    is_quoted: bool = False
    is_array: bool = False


@dataclass(frozen=True)
class Token:
    """A word, an operator, or an array that is assigned: its name with `=` or `+=`, and its words."""

    text: str
    line: int
    kind: str = "word"
    pieces: tuple[Piece, ...] = ()
    items: tuple[Token, ...] = ()


@dataclass
class _Reader:
    text: str
    position: int = 0
    line: int = 1
    heredocs: list[str] = field(default_factory=list)

    def tokens(self, until: str = "") -> Iterator[Token]:
        """Yield all tokens up to the end, or to an operator that closes an array."""
        while self.position < len(self.text):
            char = self.text[self.position]
            if blank := _BLANK.match(self.text, self.position):
                self._take(blank.end())
            elif self.text.startswith("\\\n", self.position):
                self._take(self.position + 2)
            elif char == "#":
                end = self.text.find("\n", self.position)
                self._take(len(self.text) if end < 0 else end)
            elif char == "\n":
                line = self.line
                self._take(self.position + 1)
                self._skip_heredocs()
                yield Token("\n", line, "operator")
            elif char == until:
                self._take(self.position + 1)
                return
            elif here := _HEREDOC.match(self.text, self.position):
                self.heredocs.append(here[1])
                self._take(here.end())
            elif redirects := _REDIRECTS.match(self.text, self.position):
                self._take(redirects.end())
            elif char in ";&|()":
                width = 2 if self.text[self.position : self.position + 2] in ("&&", "||", ";;") else 1
                yield Token(self._take(self.position + width), self.line, "operator")
            else:
                yield self._word(is_item=bool(until))

    def _take(self, end: int) -> str:
        taken = self.text[self.position : end]
        self.line += taken.count("\n")
        self.position = end
        return taken

    def _skip_heredocs(self) -> None:
        for word in self.heredocs:
            end = re.compile(rf"^\t*{word}$", re.MULTILINE).search(self.text, self.position)
            self._take(end.end() if end else len(self.text))
        self.heredocs = []

    def _word(self, is_item: bool) -> Token:
        start, line = self.position, self.line
        pieces: list[Piece] = []
        while self.position < len(self.text):
            if self.text[self.position] in " \t\r\n;&|()<>":
                break
            pieces += self._pieces()
            if (
                not is_item
                and self.text.startswith("(", self.position)
                and _ASSIGNS.fullmatch(self.text, start, self.position)
            ):
                name = self.text[start : self.position]
                self._take(self.position + 1)
                items = tuple(token for token in self.tokens(until=")") if token.kind == "word")
                return Token(name, line, "array", items=items)
        return Token(self.text[start : self.position], line, pieces=tuple(pieces))

    def _pieces(self, is_quoted: bool = False, depth: int = 0) -> list[Piece]:
        """Take what stands here: a run of plain characters, a quotation or an expansion."""
        char = self.text[self.position]
        if char == "\\" and self.position + 1 < len(self.text):
            taken = self._take(self.position + 2)
            is_kept = is_quoted and taken[1] not in '$`"\\\n'
            return [Piece(taken if is_kept else taken[1:].replace("\n", ""), is_quoted=True)]
        if char == "$":
            return [self._expansion(is_quoted, depth)]
        if char == "`":
            end = self.text.find("`", self.position + 1)
            return [Piece(self._take(end + 1 if end > 0 else len(self.text)), "command")]
        if is_quoted:
            plain = re.compile(r'[^\\"$`]+|.', re.DOTALL).match(self.text, self.position)
        elif char == "'":
            end = self.text.find("'", self.position + 1)
            quoted = self._take(end + 1 if end > 0 else len(self.text))
            return [Piece(quoted[1:].removesuffix("'"), is_quoted=True)]
        elif char == '"':
            return self._double_quoted(depth)
        else:
            plain = _PLAIN.match(self.text, self.position)
        return [Piece(self._take(plain.end() if plain else self.position + 1), is_quoted=is_quoted)]

    def _double_quoted(self, depth: int) -> list[Piece]:
        self._take(self.position + 1)
        pieces = [Piece("", is_quoted=True)]
        while self.position < len(self.text) and self.text[self.position] != '"':
            pieces += self._pieces(True, depth)
        self._take(min(self.position + 1, len(self.text)))
        return pieces

    def _expansion(self, is_quoted: bool, depth: int) -> Piece:
        start = self.position
        if self.text.startswith("$((", start):
            text = self._take(self._closing(start + 1, "()"))
            return Piece(text, "arithmetic" if text.endswith("))") else "other", is_quoted=is_quoted)
        if self.text.startswith(("$(", "$'"), start):
            if self.text[start + 1] == "'":
                return Piece(self._take(max(self.text.find("'", start + 2), start + 1) + 1), "other")
            return Piece(self._take(self._closing(start + 1, "()")), "command", is_quoted=is_quoted)
        if self.text.startswith("${", start):
            text = self._take(self._closing(start + 1, "{}"))
            return self._braced(text, is_quoted, depth)
        if name := _NAME.match(self.text, start + 1):
            return Piece(self._take(name.end()), "variable", name[0], is_quoted=is_quoted)
        text = self._take(min(start + 2, len(self.text)))
        return Piece(text, "other" if len(text) == 2 and text[1] in "0123456789@*#?$!-" else "text", is_quoted=True)

    def _braced(self, text: str, is_quoted: bool, depth: int) -> Piece:
        match = re.fullmatch(r"\$\{([A-Za-z_]\w*)(\[[@*]\])?(?::?-(.*))?\}", text, re.DOTALL)
        if not match or depth > DEEPEST:
            return Piece(text, "other", is_quoted=is_quoted)
        name, all_items, default = match[1], match[2], match[3]
        pieces: list[Piece] | None = None
        if default is not None:
            reader, pieces = _Reader(default), []
            while reader.position < len(default):
                pieces += reader._pieces(is_quoted, depth + 1)
        given = None if pieces is None else tuple(pieces)
        return Piece(text, "variable", name, given, is_quoted, bool(all_items))

    def _closing(self, start: int, brackets: str) -> int:
        """Return the place behind the bracket that closes the one at `start`; quotations and escapes are skipped."""
        opening, closing = brackets[0], brackets[1]
        depth = 0
        skipped = re.compile(r"""\\.|'[^']*'|[^\\']""", re.DOTALL)
        position = start
        while position < len(self.text) and (match := skipped.match(self.text, position)):
            depth += (match[0] == opening) - (match[0] == closing)
            position = match.end()
            if depth == 0:
                return position
        return len(self.text)


def read_tokens(text: str) -> list[Token]:
    """Return the words and operators of a bash script; comments and heredocs are left out."""
    return list(_Reader(text).tokens())

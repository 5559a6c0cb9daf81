"""Launch scripts in bash, in the layout of slime's: arrays of flags, variables, and one command that gets them all.

The script is read from top to bottom and no command of it is run. Variables are known that it sets itself, outside of
branches and loops, to texts, to other variables, or to `${NAME:-a default}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.foreign.expression import whole_number
from posttrain.foreign.script import (
    MOST_CHARACTERS,
    MOST_WORDS,
    PROGRAM,
    UNSET,
    Budget,
    Given,
    Script,
    Word,
    flags_of,
    read_text,
    split_words,
)
from posttrain.foreign.shell_words import Piece, Token, read_tokens

_OPENS = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_GOES_ON = {"then", "else", "elif", "do", "!"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
# Scripts that source scripts.
_DEEPEST = 5


def read_shell(path: Path) -> Script:
    """Return the flags that a bash script gives to `train.py`, or those of all its arrays where it calls none."""
    reader = _Shell(path.parent, path.name)
    reader.read(read_text(path))
    words = reader.command or [word for name, words in reader.arrays.items() if "ARGS" in name for word in words]
    script = flags_of(words)
    return replace(script, unread=(*script.unread, *reader.unread))


@dataclass
class _Shell:
    folder: Path
    file: str
    depth: int = 0
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    command: list[Word] = field(default_factory=list)
    unread: list[Given] = field(default_factory=list)
    # The line of each branch or loop that is open.
    branches: list[int] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)

    def read(self, text: str) -> None:
        """Read a script, or one that is sourced."""
        before = ""
        for line, operator, tokens in _commands(read_tokens(text)):
            tokens = self._enter(line, tokens)
            why = f"only in the branch or loop of line {self.branches[-1]}" if self.branches else ""
            if before in ("&&", "||"):
                why = f"only if the command before {before!r} says so"
            if tokens:
                self._command(tokens, why)
            before = operator

    def _enter(self, line: int, tokens: list[Token]) -> list[Token]:
        """Note the words that open and close branches, and return what is left of a command."""
        for place, token in enumerate(tokens):
            if token.text in _OPENS:
                self.branches.append(line)
                if token.text in ("for", "select", "case"):
                    return []
            elif token.text in _CLOSES:
                self.branches = self.branches[:-1]
            elif token.text not in _GOES_ON:
                return tokens[place:]
        return []

    def _command(self, tokens: Sequence[Token], why: str) -> None:
        declared = [token for token in tokens if token.text not in _DECLARES and not token.text.startswith("-")]
        if tokens[0].kind == "array" or _ASSIGNMENT.match(tokens[0].text) or tokens[0].text in _DECLARES:
            for token in declared:
                if token.kind == "array":
                    self._assign_array(token, why)
                elif match := _ASSIGNMENT.match(token.text):
                    self._assign(match[1], match[2], token, why)
            if tokens[0].text in _DECLARES or all(t.kind == "array" or "=" in t.text for t in tokens):
                return
        if tokens[0].text in ("source", ".") and len(tokens) > 1:
            self._source(tokens[1], why)
            return
        if tokens[0].text in ("eval", "exec") and any("--" in token.text for token in tokens):
            spelled = " ".join(token.text for token in tokens)[:80]
            self.unread.append(Given(spelled, (), self._at(tokens[0]), "nothing is run"))
        self._train(tokens)

    def _train(self, tokens: Sequence[Token]) -> None:
        """Keep the words behind `train.py`, on the command line or inside of one of its words."""
        words = [word for token in tokens for word in self._expand(token)]
        for index, word in enumerate(words):
            inner = [] if word.why else [Word(plain, word.place) for _, _, plain in split_words(word.text)]
            place = next((at for at, part in enumerate(inner) if PROGRAM.search(part.text)), None)
            if place is not None:
                self.command = [*inner[place + 1 :], *words[index + 1 :]]
                return

    def _assign(self, name: str, operator: str, token: Token, why: str) -> None:
        before = self.scalars.get(name) if operator == "+=" else None
        # The name stands in the first piece.
        first = token.pieces[0]
        rest = (replace(first, text=first.text[len(name) + len(operator) :]), *token.pieces[1:])
        value = self._joined(rest, token)
        if before is not None and not value.why:
            value = replace(before, text=before.text + value.text, place=value.place)
        if why:
            value = Word(f"${name}", self._at(token), f"line {token.line} sets {name} {why}")
        self.arrays.pop(name, None)
        self.scalars[name] = value if len(value.text) <= MOST_CHARACTERS else replace(value, why="it is too long")

    def _assign_array(self, token: Token, why: str) -> None:
        name, is_more = token.text.rstrip("+="), token.text.endswith("+=")
        words = [word for item in token.items for word in self._expand(item)]
        if why:
            words = [replace(word, why=word.why or why) for word in words]
        before = self.arrays.get(name, []) if is_more or why else []
        self.scalars.pop(name, None)
        self.arrays[name] = [*before, *words][:MOST_WORDS]

    def _source(self, token: Token, why: str) -> None:
        """Read a script beside this one: of its path, what follows the last thing that is not known."""
        known = self._joined(token.pieces, token)
        tail = known.text if not known.why else "".join(p.text if p.kind == "text" else "\0" for p in token.pieces)
        place = self.folder / tail.rpartition("\0")[2].lstrip("/")
        is_inside = place.resolve().is_relative_to(self.folder.resolve())
        if why or not is_inside or not place.is_file() or self.depth >= _DEEPEST:
            reason = why or "it does not lie beside the script, so what it sets is not known"
            self.unread.append(Given(f"source {token.text}", (), self._at(token), reason))
            return
        inner = replace(self, file=str(place.relative_to(self.folder)), depth=self.depth + 1, branches=[], unread=[])
        inner.read(read_text(place))
        self.unread += inner.unread
        self.command = inner.command

    # ---- values ----

    def _at(self, token: Token) -> str:
        return f"{self.file}:{token.line}"

    def _expand(self, token: Token) -> Iterator[Word]:
        """Yield the words that a word becomes."""
        pieces = token.pieces
        if len(pieces) == 1 and pieces[0].kind == "variable" and not pieces[0].is_quoted:
            yield from self._items(pieces[0], token)
            return
        if len(pieces) == 2 and pieces[1].is_array and not pieces[0].text:  # "${NAME[@]}"
            yield from self._items(pieces[1], token)
            return
        yield self._joined(pieces, token)

    def _items(self, piece: Piece, token: Token) -> Iterator[Word]:
        if piece.name in self.arrays and piece.is_array:
            self.budget.spend(5 * len(self.arrays[piece.name]))
            yield from self.arrays[piece.name]
            return
        value = self._joined((piece,), token)
        if value.why:
            yield replace(value, is_list=piece.is_array or piece.name.endswith("ARGS"))
        else:
            yield from (Word(text, self._at(token)) for text in value.text.split())

    def _joined(self, pieces: Sequence[Piece], token: Token) -> Word:
        """Return one word, as the script spells it where some of it is not known."""
        texts: list[str] = []
        for piece in pieces:
            found, why = self._value(piece, token)
            if why:
                return Word(token.text, self._at(token), why)
            texts.append(found)
            self.budget.spend(len(found))
            if sum(map(len, texts)) > MOST_CHARACTERS:
                return Word(token.text, self._at(token), "it is too long")
        return Word("".join(texts), self._at(token))

    def _value(self, piece: Piece, token: Token) -> tuple[str, str]:
        """Return a piece's text, and why it is not known."""
        if piece.kind == "text":
            return piece.text, ""
        if piece.kind == "arithmetic":
            inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._scalar(m[1]), piece.text[3:-2])
            number = whole_number(inner)
            return ("", f"{piece.text} is not computed") if number is None else (str(number), "")
        if piece.kind != "variable":
            reason = "is the output of a command, and none is run" if piece.kind == "command" else "is not expanded"
            return "", f"{piece.text} {reason}"
        value = self.scalars.get(piece.name)
        if value is not None and not value.why and (value.text or piece.default is None):
            return value.text, ""
        if value is not None and value.why:
            return "", value.why
        if piece.default is not None:
            word = self._joined(piece.default, token)
            return word.text, word.why
        return "", f"{UNSET} {piece.name}"

    def _scalar(self, name: str) -> str:
        value = self.scalars.get(name)
        return value.text if value is not None and not value.why and value.text.isdigit() else name


def _commands(tokens: Sequence[Token]) -> Iterator[tuple[int, str, list[Token]]]:
    """Yield (line, the operator that ends it, words) of each simple command."""
    words: list[Token] = []
    for token in tokens:
        if token.kind == "operator":
            yield token.line, token.text, words
            words = []
        else:
            words.append(token)
    yield (words[0].line if words else 0), "", words

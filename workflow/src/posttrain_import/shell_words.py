"""Expands words of bash: quotes, expansions and splitting. Unknown words keep their spelling and a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from posttrain_import import script
from posttrain_import.expression import whole_number
from posttrain_import.script import FLAG, UNSET, Budget, Word, too_much
from posttrain_import.shell_state import State
from posttrain_import.shell_tree import Unclear

_RUNS = "is known only when the script runs"
_INNER = r"\$\w++|\$\{(?:[^{}$`'\"\\]|\$\w++)*+\}|\$\(\([^()]*+\)\)"
_EXPANSION = (
    r"\$(?:[A-Za-z_]\w*+|[\d@*#?$!-]|\(echo (?:[^()`;&|<>#\\]|\$\(\([^()]*+\)\))*+\)"
    rf"|\(\((?:[^()$`]|{_INNER}|\((?:[^()$`]|{_INNER})*+\))*+\)\)"
    rf"|\{{(?:[^{{}}$`'\"\\]|{_INNER}|\"(?:[^\"{{}}$`\\]|{_INNER})*+\")*+\}})"
)
_UNQUOTED = re.compile(
    r"\$'(?P<ansi>(?:[^'\\]|\\[nt'\\])*+)'|"
    rf"'(?P<raw>[^']*+)'|\"(?P<quoted>(?:[^\"\\$`]|\\.|{_EXPANSION}|\$(?=[\s\"]))*+)\"|(?P<expansion>{_EXPANSION})"
    r"|\\(?P<escaped>.)|(?P<plain>[^\s\\$`'\"|&;<>()]+|\$\Z)",
    re.DOTALL,
)
_QUOTED = re.compile(rf"(?P<expansion>{_EXPANSION})|\\(?P<escaped>[$`\"\\\n])|(?P<plain>[^\\$`\"]+|[\\$])", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?$!-])|\{(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?\})", re.DOTALL)
_CHANGED = re.compile(r"\$\{(#?)([A-Za-z_]\w*)(\[@\])?((?:[#%/^,:].*)?)\}", re.DOTALL)
# A word that is a list of items, and the words of `echo`.
_LIST = re.compile(r"(\"?)\$(?:([@*])|\{(?:([@*])|([A-Za-z_]\w*)\[([@*])\])\})\1")
_BRACES = re.compile(r"([\w./=-]*)\{([\w./=-]*(?:,[\w./=-]*)+)\}([\w./=-]*)", re.ASCII)
_WORD = re.compile(r"(?:'[^']*'|\"[^\"]*\"|\$\(\(.*?\)\)|[^\s'\"])+")
_CHANGES = re.compile(r"\b([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*(\w+)")
# Expansions that set variables.
SETS = re.compile(
    r"\$\{\w+:?=|\$(?:\(\(|\[)[^)]*(?:(?<![=!<>])=(?!=)|\+\+|--)|\$\{\w+(?:\[|:[^-+?=}])[^}]*(?:=|\+\+|--)"
)
# Lists of layers that are not file patterns: [0]*3+[1]*75.
_NO_FILE = re.compile(r"(\+?\[[\d, ]*\](\*\d+)?)+")
# Names of variables with several flags, and substitutions whose output has no flags.
_FLAGS = re.compile(r"\$\{?\w*(args?|flags?|opts?|options|extra)\}?", re.IGNORECASE)
_NO_FLAGS = re.compile(r"\$\((seq|date|nproc|basename|dirname|hostname|pwd|wc|mktemp)\b[^()`]*\)")


@dataclass(frozen=True)
class _Piece:
    text: str
    is_quoted: bool = False
    is_split: bool = False
    why: str = ""
    is_list: bool = False


class Words:
    """Expands words in one state.

    Args:
        state: Known variables.
        place: File and line of the words.
        budget: Limits the work for the script.
    """

    def __init__(self, state: State, place: str, budget: Budget):
        self._state, self._place, self._budget = state, place, budget

    def fields(self, text: str) -> list[Word]:
        """Return the words to which a word of a command expands."""
        if match := _LIST.fullmatch(text):
            return self._items(match, text)
        if (match := _BRACES.fullmatch(text)) and all(
            parts := [f"{match[1]}{one}{match[3]}" for one in match[2].split(",")]
        ):
            return [Word(part, self._place) for part in parts]
        word, pieces = self._joined(text, False)
        spelled = "".join(piece.text for piece in pieces if not piece.is_quoted and not piece.is_split)
        if re.search(r"\{.*(,|\.\.)", spelled, re.DOTALL):
            is_list = bool(FLAG.search(text))
            return [replace(word, why=f"{text} is not expanded", is_list=is_list, is_split=True)]
        if word.why:
            is_split = word.is_split or (len(pieces) == 1 and not pieces[0].is_quoted)
            return [replace(word, is_list=word.is_list or bool(_FLAGS.fullmatch(text)), is_split=is_split)]
        bare = "".join(piece.text for piece in pieces if not piece.is_quoted)
        if text.startswith("~"):
            return [replace(word, why=f"the home folder {_RUNS}")]
        # \0 marks split positions; \1 marks quotes, which preserve empty words.
        parts = [
            f"\1{piece.text}" if piece.is_quoted else _split(piece.text) if piece.is_split else piece.text
            for piece in pieces
        ]
        found = [part.replace("\1", "") for part in "".join(parts).split("\0") if part]
        self._budget.spend(5 * len(found))
        return [replace(word, text=part, why=_pattern(bare, part)) for part in found]

    def joined(self, text: str, is_quoted: bool = False) -> Word:
        """Return one word without splitting, such as the value of an assignment."""
        word, _ = self._joined(text, is_quoted)
        is_home = not is_quoted and re.search(r"(^|[:=])~", text)
        return replace(word, why=f"the home folder {_RUNS}") if is_home else word

    def arithmetic(self, text: str) -> int | None:
        """Return an expression's number; None if unknown, in which case its variables become unknown, too."""
        plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda match: self._number(match[1]), text)
        # Bash rounds towards zero, and -2**2 is 4.
        is_plain = re.fullmatch(r"[\d\s()+*/%<>=!?:]+|(?:[\d\s()+-]|\*(?!\*))+", plain) and not _CHANGES.search(text)
        chosen = re.sub(r"([^?]+)\?([^?:]+):([^?:]+)", r"(\2) if (\1) else (\3)", plain).replace("/", "//")
        found = whole_number(chosen) if is_plain else None
        if found is not None and abs(found) < 2**63:
            return int(found)
        self._state.forget(changed_names(text), f"{text.strip()} is not computed")
        return None

    def _number(self, name: str) -> str:
        word = self._value(name)
        return word.text if not word.why and re.fullmatch(r"0|[1-9]\d*", word.text) else name

    def _joined(self, text: str, is_quoted: bool) -> tuple[Word, list[_Piece]]:
        try:
            pieces = list(self._pieces(text, is_quoted))
        except Unclear as error:
            if SETS.search(text):
                self._state.forget(re.findall(r"[A-Za-z_]\w*", text), str(error))
            is_output = text.startswith(("$(", "`")) and not _NO_FLAGS.fullmatch(text)
            is_one = re.fullmatch(r'"[^"]*"|"\$\(.*\)"', text, re.DOTALL)
            is_list = not is_one and bool(FLAG.search(text))
            return Word(text.strip("\"'"), self._place, str(error), is_list, is_output), []
        found = "".join(piece.text for piece in pieces)
        if len(found) > script.MOST_CHARACTERS:
            raise too_much(f"a word is longer than {script.MOST_CHARACTERS} characters")
        self._budget.spend(1 + len(found))
        why = next((piece.why for piece in pieces if piece.why), "")
        return Word(found, self._place, why, any(piece.is_list for piece in pieces)), pieces

    def _pieces(self, text: str, is_quoted: bool) -> Iterator[_Piece]:
        """Yield the pieces of a word.

        Raises:
            Unclear: A part cannot be expanded.
        """
        at = 0
        while at < len(text):
            match = (_QUOTED if is_quoted else _UNQUOTED).match(text, at)
            if match is None or "\1" in text:
                is_output = re.search(r"\$\((?!\()|`|[<>]\(", text)
                reason = "is the output of a command, and none is run" if is_output else "is not expanded"
                raise Unclear(f"{text} {reason}")
            at, kind, found = match.end(), match.lastgroup, match[match.lastgroup or 0]
            if kind == "expansion":
                yield from self._expanded(found, is_quoted)
            elif kind == "ansi":
                yield _Piece(
                    re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), found), True
                )
            elif kind == "quoted":
                yield _Piece("", True)
                yield from self._pieces(found, True)
            elif found != "\n" or kind != "escaped":
                yield _Piece(found, is_quoted or kind != "plain")

    def _expanded(self, text: str, is_quoted: bool) -> Iterator[_Piece]:
        match = _VARIABLE.fullmatch(text)
        if text.startswith("$(("):
            number = self.arithmetic(text[3:-2])
            why = f"{text} is not computed" if number is None else ""
            yield _Piece(text if why else str(number), is_quoted, why=why)
        elif text.startswith("$(echo "):
            words = [word for part in _WORD.findall(text[7:-1]) for word in self.fields(part)]
            is_known = not any(word.why for word in words) and not re.match(r"-[^-]", text[7:])
            why = "" if is_known else f"{text} is the output of a command, and none is run"
            output = text if why else " ".join(word.text for word in words)
            yield _Piece(output, is_quoted, not is_quoted, why, bool(why and not is_quoted and FLAG.search(text)))
        elif (changed := _CHANGED.fullmatch(text)) and (found := self._changed(changed)) is not None:
            yield _Piece(found, is_quoted, not is_quoted)
        elif match is None or (match[3] or match[2] or match[1]) == "@":
            if SETS.search(text):
                raise Unclear(f"{text} may set what is not known")
            name = re.match(r"\$\{(!?)(\w+|[@*])", text)
            is_list = bool(name and (name[1] or name[2] in "@*" or self._state.get(name[2]).has_flags()))
            yield _Piece(text, is_quoted, not is_quoted, f"{text} is not expanded", is_list)
        else:
            yield from self._variable(text, match, is_quoted)

    def _variable(self, text: str, match: re.Match[str], is_quoted: bool) -> Iterator[_Piece]:
        name, operator, rest = match[1] or match[2], match[4] or "", match[5] or ""
        word = self._value("@" if name == "*" else name, "*" if name == "*" else match[3] or "")
        is_unset = word.why == f"{UNSET} {name}" and (name.isdigit() or self._state.get(name).is_unset())
        is_missing = is_unset or (operator[:1] == ":" and not word.text and not word.why)
        is_known = not word.why or is_missing
        if operator[-1:] == "=" and (is_missing or not is_known):
            word = self.joined(rest, is_quoted) if is_missing else word
            self._state.assign(name, [word])
        elif is_known and (operator[-1:], is_missing) in (("-", True), ("+", False)):
            if rest.startswith("~"):
                raise Unclear(f"the home folder {_RUNS}")
            yield from self._pieces(rest, is_quoted)
            return
        elif operator[-1:] == "+" and is_known:
            return
        yield _Piece(text if word.why else word.text, is_quoted, not is_quoted, word.why, word.is_list)

    def _changed(self, match: re.Match[str]) -> str | None:
        """Return the result of an expansion of a known text; None if it is not supported."""
        sign, name, is_all, rest = match.groups()
        words = self._state.get(name).words
        if any(word.why or not word.text.isascii() for word in words) or not words or (is_all and not sign):
            return None
        text = words[0].text
        if sign:
            return None if rest else str(len(words) if is_all else len(text))
        if found := re.fullmatch(r":(\d):(\d)", rest):
            return text[int(found[1]) :][: int(found[2])]
        if found := re.fullmatch(r"(//?)([\w.:@+-]+)/([\w.:@+-]*)", rest):
            return text.replace(found[2], found[3], 1 if found[1] == "/" else -1)
        if found := re.fullmatch(r"(##?)\*([\w./:@+-])|(%%?)([\w./:@+-])\*", rest):
            mark = found[2] or found[4]
            cut = {"#": text.partition, "##": text.rpartition, "%": text.rpartition, "%%": text.partition}
            return cut[found[1] or found[3]](mark)[2 if found[1] else 0] if mark in text else text
        return {"^^": text.upper(), ",,": text.lower()}.get(rest)

    def _value(self, name: str, index: str = "") -> Word:
        """Return the text of a variable, of one of its items, or of all joined with spaces."""
        if name.isdigit() and name != "0":
            index, name = name, "@"
        variable = self._state.get(name)
        words, is_open = variable.words, any(word.why for word in variable.words)
        if index == "*":
            why = next((word.why for word in words if word.why), "")
            return Word("" if why else " ".join(word.text for word in words), self._place, why)
        place = int(index or 0) - (name == "@")
        if variable.is_unset() or (place >= len(words) and not is_open):
            return Word("", self._place, f"{UNSET} {index if name == '@' else name}")
        if index and (any(word.why for word in words[: place + 1]) or not variable.is_array):
            return Word("", self._place, "its place is not known", True)
        return replace(words[place], text="" if words[place].why else words[place].text)

    def _items(self, match: re.Match[str], text: str) -> list[Word]:
        """Return the items of a list."""
        mark, sign = match[1], match[2] or match[3] or match[5]
        found = []
        for word in self._state.get(match[4] or "@").words:
            self._budget.spend(5)
            if word.why:
                found.append(word if word.text else Word(text.strip('"'), self._place, word.why, True))
            else:
                parts = [word.text] if mark else _split(word.text).split("\0")
                why = "" if mark else _pattern(word.text, word.text)
                found += [replace(word, text=part, why=why) for part in parts if part or mark]
        if not mark or sign == "@":
            return found
        why = next((word.why for word in found if word.why), "")
        return [Word(text.strip('"') if why else " ".join(word.text for word in found), self._place, why)]


def changed_names(text: str) -> list[str]:
    """Return the variables that an arithmetic expression sets."""
    return [name for names in _CHANGES.findall(text) for name in names if name]


def _split(text: str) -> str:
    return re.sub("[ \t\n]+", "\0", text)


def _pattern(bare: str, text: str) -> str:
    """Return why a word with some unquoted characters is unknown as a file pattern; "" if it is none."""
    is_pattern = re.search(r"[*?[]", bare) and re.search(r"[*?]|\[.*\]", text, re.DOTALL)
    return f"which files it names {_RUNS}" if is_pattern and not _NO_FILE.fullmatch(text) else ""

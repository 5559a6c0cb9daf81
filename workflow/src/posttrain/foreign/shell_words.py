"""Words of bash: quotes, expansions and splitting. What is not known keeps its spelling and a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign import script
from posttrain.foreign.script import UNSET, Word, too_much
from posttrain.foreign.shell_arithmetic import number
from posttrain.foreign.shell_scan import BREAK, PLAIN, Part, end_of_expansion, end_of_quotes, unescaped
from posttrain.foreign.shell_state import State, Variable
from posttrain.foreign.shell_tree import Ends, Misread, Unclear, check, parse

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_VARIABLE = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?])(?:\[([^\[\]]*)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_CHANGED = re.compile(r"\$\{([A-Za-z_]\w*|[1-9])((?:[#%/^,]|:(?![-=+?])).*)\}", re.DOTALL)
_CHANGES = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--|<<=|>>=")
# Expansions that may set variables where they stand in others.
_SETS = re.compile(r"\$\{\w+(\[.*?\])?(:?=|:[^-=+?].*(=|\+\+|--))|\$\(\([^)]*(=|\+\+|--)|\[[^]]*(=|\+\+|--)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
# Lists of layers that no file is called: [0]*3+[1]*75.
_NO_FILE = re.compile(r"(\+?\[[\d, ]*\](\*\d+)?)+")
# Braces with nothing but plain characters: run_{a,b}, {1..8}.
_BRACES = re.compile(
    r"([\w./=-]*)\{(?:(0|[1-9]\d{0,3})\.\.(0|[1-9]\d{0,3})|([\w./=-]*(?:,[\w./=-]*)+))\}([\w./=-]*)", re.ASCII
)
_HOME = "the home folder is known only when the script runs"


class Words:
    """Expands words in one state."""

    def __init__(self, shell: Shell, state: State, place: str):
        self._shell, self._state, self._place = shell, state, place
        # Whether a list was expanded of which not all items need be there.
        self.is_open = False

    def fields(self, text: str) -> list[Word]:
        """Return the words that a word of a command becomes."""
        if match := _BRACES.fullmatch(text):
            before, first, last, listed, after = match.groups()
            ends = range(int(first), int(last) + 1) if first and int(first) <= int(last) else ()
            self._shell.budget.spend(5 * len(ends))
            texts = [f"{before}{one}{after}" for one in (ends if first else listed.split(","))]
            if texts and all(texts):
                return [Word(one, self._place) for one in texts]
        parts = list(self.parts(text))
        bare = "".join(part.text for part in parts if not (part.is_quoted or part.is_split))
        if re.search(r"\{.*,|\{[-+\w]+\.\.[-+\w.]+\}", bare, re.DOTALL):
            return [Word(text, self._place, f"{text} is not expanded", True)]
        if text.startswith("~"):
            return [Word(text, self._place, _HOME)]
        return list(self._fields(parts))

    def joined(self, text: str, is_quoted: bool = False, is_inner: bool = False) -> Word:
        """Return one word that is not split, such as the value of an assignment."""
        if not is_quoted and re.search(r"(^|[:=])~", text):
            return Word(text, self._place, _HOME)
        return self._word(list(self.parts(text, is_quoted, is_inner)), False)

    def fits(self, word: Word, pattern: str) -> bool | None:
        """Tell whether a text is of a pattern; None where that is not known."""
        shape = self._shape(pattern)
        if shape is None or word.why or not word.text.isascii():
            return None
        self._shell.budget.spend(len(word.text) * (1 + len(pattern)))
        return bool(shape.match(word.text))

    def _shape(self, pattern: str) -> re.Pattern[str] | None:
        """Return a pattern of bash as Python's; None where it is not known or not followed."""
        parts = list(self.parts(pattern, is_inner=True))
        bare = "".join(part.text for part in parts if not part.is_quoted)
        if re.search(r"^~|\\|\(|\[(?!(\w-\w|\w)+\])", bare) or any(part.why for part in parts):
            return None
        # Python's translation takes no more time for many stars.
        return re.compile(
            fnmatch.translate(
                "".join(re.sub(r"[*?[]", r"[\g<0>]", part.text) if part.is_quoted else part.text for part in parts)
            )
        )

    # ---- arithmetic ----

    def arithmetic(self, text: str) -> int | None:
        """Return an expression's number; None where it is not known, and then what it sets is not, either."""
        expanded = self.joined(text.replace('"', ""), is_quoted=True)
        self._shell.budget.spend(len(expanded.text))
        found = None
        change = re.fullmatch(r"\s*(\w+)\s*(?:([-+*/%]?)=(?!=)(.*)|(\+\+|--)\s*)", expanded.text, re.DOTALL)
        if not expanded.why and change and _NAME.fullmatch(change[1]):
            name, sign, rest, step = change.groups()
            found = number(f"{name}{step[0]}1" if step else f"{name}{sign}({rest})" if sign else rest, self._value)
            if found is not None:
                self._state.assign(name, Word(str(found), self._place))
                return found if not step else found - int(f"{step[0]}1")
        elif not expanded.why:
            found = number(expanded.text, self._value)
        if found is None and _CHANGES.search(text + expanded.text):
            for name in _NAME.findall(text + expanded.text):
                self._state.forget(name, f"{text.strip()} is not computed")
        return found

    def _value(self, name: str) -> str | None:
        """Return the text of a variable in an expression."""
        word = self.joined(f"${{{name}}}")
        if not word.why and re.search(r"[=\[$]|\+\+|--", word.text):
            raise Unclear(f"{name} holds an expression")
        return None if word.why else word.text or "0"

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
        self._shell.budget.spend(1 + len(text))
        at = 0
        while at < len(text):
            char = text[at]
            start, at = at, at + 1
            if char == "\\":
                at += 1
                escaped = text[start + 1 : at]
                if escaped != "\n":
                    is_kept = is_quoted and escaped not in '$`"\\' if escaped else True
                    yield Part(f"\\{escaped}" if is_kept else escaped, is_quoted=True)
            elif char in "$`":
                if char == "$" and text[at : at + 1] in ("'", '"') and not is_quoted:
                    at = end_of_quotes(text, at, text[at], True)
                    yield unescaped(text[start:at])
                    continue
                at = end_of_expansion(text, start)
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
                run = PLAIN.match(text, start)
                at = run.end() if run else at
                yield Part(text[start:at], is_quoted=is_quoted)

    def _expansion(self, text: str, is_quoted: bool) -> Iterator[Part]:
        if text == "$":
            yield Part(text, is_quoted=is_quoted)
        elif text.startswith("$[") or (text.startswith("$((") and text.endswith("))")):
            found = self.arithmetic(text[2:-1] if text[1] == "[" else text[3:-2])
            why = f"{text} is not computed" if found is None else ""
            yield Part(text if why else str(found), why, is_quoted, not (is_quoted or why))
        elif text.startswith(("$(", "`")):
            inner = text[2:-1] if text[0] == "$" else re.sub(r"\\([\\`$])", r"\1", text[1:-1])
            self._state.status = self._shell.apart(inner, self._place, self._state)
            output = self._output(inner)
            why = f"{text} is the output of a command, and none is run" if output is None else ""
            yield Part(text if output is None else output, why, is_quoted, not is_quoted)
        else:
            yield from self._variable(text, is_quoted)

    def _output(self, text: str) -> str | None:
        """Return what a text writes that is nothing but `echo` or `seq`; None: it is something else."""
        code = parse(text, "").parts
        name = code[0].parts[0].text if len(code) == 1 and code[0].type == "command" else ""
        if name not in ("echo", "seq") or name in self._state.functions:
            return None
        check(code[0])
        inner = Words(self._shell, self._state.copy(), self._place)
        words = [word for part in code[0].parts[1:] for word in inner.fields(part.text)]
        texts = [word.text for word in words]
        if inner.is_open or any(word.why for word in words) or re.match(r"-[neE]+$", "".join(texts[:1])):
            return None
        if name == "echo":
            return " ".join(texts).rstrip("\n")
        if not 1 <= len(texts) <= 3 or not all(re.fullmatch(r"[1-9]\d{0,3}", one) for one in texts):
            return None
        numbers = [int(one) for one in texts]
        first = numbers[0] if len(numbers) > 1 else 1
        found = range(first, numbers[-1] + 1, numbers[1] if len(numbers) == 3 else 1)
        self._shell.budget.spend(5 * len(found))
        return "\n".join(map(str, found))

    # ---- variables ----

    def _variable(self, text: str, is_quoted: bool) -> Iterator[Part]:
        if changed := _CHANGED.fullmatch(text):
            yield self._changed(text, changed[2], self._items(changed[1], None, False), is_quoted)
            return
        match = _VARIABLE.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None or (match[1] and match[4]):
            if _SETS.search(text):
                raise Unclear(f"{text[:60]} may set what is not known")
            yield Part(text, f"{text} is not expanded", is_quoted, not is_quoted or "@" in text)
            return
        sign, name, index, operator, rest = match.groups()
        is_all = (index or name) in ("@", "*")
        words, why = self._items(name, index, is_all)
        if operator:
            yield from self._default(text, words, why, operator, (name, index, rest), is_quoted)
            return
        if sign and not why:
            words, why = self._count(name, words, is_all)
        if not (sign or why or words or is_all):
            if "nounset" in self._state.options and "unclear" not in self._state.options:
                raise Ends
            words = [Word("", self._place)]
        is_list = is_all and (not is_quoted or (index or name) == "@")
        if not why and is_all and "IFS" in self._state.variables and not (is_list and is_quoted):
            why = "the marks of IFS are not followed"
        if why:
            yield Part(text, why, is_quoted, not sign and (not is_quoted or is_list))
            return
        self.is_open = self.is_open or (is_all and "open" in self._state.get("@" if name == "*" else name).marks)
        for number_of, word in enumerate(words):
            if number_of:
                yield BREAK if is_list else Part(" ", is_quoted=True)
            self._shell.budget.spend(5)
            spelled = text if word.why and not is_list else word.text
            yield Part(spelled, word.why, is_quoted, not is_quoted, word if is_list else None)

    def _changed(self, text: str, rest: str, found: tuple[list[Word], str], is_quoted: bool) -> Part:
        """Return what `${X%pattern}` and the like make of a text."""
        word, why = next(iter(found[0]), Word("", self._place)), found[1]
        result = None if why or word.why or not word.text.isascii() or not found[0] else self._change(word.text, rest)
        if result is None and _SETS.search(text):
            raise Unclear(f"{text[:60]} may set what is not known")
        if result is None:
            return Part(text, why or word.why or f"{text} is not expanded", is_quoted, not is_quoted)
        return Part(result, "", is_quoted, not is_quoted)

    def _change(self, text: str, rest: str) -> str | None:
        if match := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
            return text[int(match[1]) :][: int(match[2]) if match[2] else None]
        if match := re.fullmatch(r"(//?)([\w.:@+-]+)/([\w.:@+-]*)", rest):
            return text.replace(match[2], match[3], 1 if match[1] == "/" else -1)
        if match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
            sign, shape = match[1], self._shape(match[2])
            self._shell.budget.spend(len(text) * (1 + len(text) // 64) * len(rest))
            places = range(len(text) + 1)
            # The shortest beginning or the longest end comes first.
            for at in places if sign in ("#", "%%") else reversed(places):
                if shape is not None and shape.match(text[:at] if sign[0] == "#" else text[at:]):
                    return text[at:] if sign[0] == "#" else text[:at]
            return text if shape is not None else None
        return {"^^": text.upper(), ",,": text.lower()}.get(rest)

    def _count(self, name: str, words: Sequence[Word], is_all: bool) -> tuple[list[Word], str]:
        """Return how many items there are, or characters, which depends on the locale."""
        if not is_all and not any(word.why or not word.text.isascii() for word in words):
            return [Word(str(sum(len(word.text) for word in words)), self._place)], ""
        if is_all and "open" not in self._state.get("@" if name == "*" else name).marks:
            return [Word(str(len(words)), self._place)], ""
        return [], "how many there are is not known"

    def _items(self, name: str, index: str | None, is_all: bool) -> tuple[list[Word], str]:
        """Return the values of `NAME[index]`, and why they are not known."""
        if name == "?":
            status = self._state.status
            return [Word(str(status), self._place)], "" if status is not None else "the status is not known"
        variable: Variable = self._state.get("@" if name in ("*", "#") or name.isdigit() else name)
        place = 0 if is_all or index is None else self.arithmetic(index)
        if variable.why or name == "0":
            return [], variable.why or "$0 is known only when the script runs"
        if is_all:
            return list(variable.words), ""
        if place is None or place < 0 or variable.marks & {"open", "special"}:
            return [], "the index is not known"
        if name == "#":
            return [Word(str(len(variable.words)), self._place)], ""
        if name.isdigit():
            place = int(name) - 1
            if place >= len(variable.words) and not self._shell.depth_of_calls:
                return [], f"{UNSET} {name}"
        return list(variable.words[place : place + 1]), ""

    def _default(
        self,
        text: str,
        words: Sequence[Word],
        why: str,
        operator: str,
        target: tuple[str, str | None, str],
        is_quoted: bool,
    ) -> Iterator[Part]:
        """Yield the pieces of `${NAME:-text}` and its relatives."""
        name, index, rest = target
        is_default = why == f"{UNSET} {name}"
        if is_default and operator[-1] != "?":
            why = ""
        is_unset = not words
        if operator[0] == ":" and words and not why:
            why = next((word.why for word in words if word.why), "")
            is_unset = not "".join(word.text for word in words)
        if not why and "open" in self._state.get(name).marks:
            why = "how many there are is not known"
        if why or (operator[-1] == "=" and index):
            if _SETS.search(rest) or (operator[-1] == "=" and index):
                raise Unclear(f"{text[:60]} may set what is not known")
            if operator[-1] == "=":
                self._state.forget(name, why)
            yield Part(text, why, is_quoted, not is_quoted or index == "@")
        elif is_unset is (operator[-1] == "+"):
            if operator[-1] != "+":
                yield from self._variable(f"${{{name}}}" if index is None else f"${{{name}[{index}]}}", is_quoted)
        elif operator[-1] == "?":
            raise Ends
        elif operator[-1] == "=":
            word = self.joined(rest, is_quoted, is_inner=True)
            self._state.assign(name, word)
            yield Part(text if word.why else word.text, word.why, is_quoted, not is_quoted)
        else:
            # Outside of quotes, its own characters are split, too.
            for part in self.parts("${HOME}" + rest[1:] if rest.startswith("~") else rest, is_quoted, is_inner=True):
                yield part if part.is_quoted else replace(part, is_split=True)

    # ---- from parts to words ----

    def _fields(self, parts: Sequence[Part]) -> Iterator[Word]:
        current: list[Part] | None = None
        for part in parts:
            self._shell.budget.spend(1 + len(part.text))
            if part is BREAK:
                if current:
                    yield self._word(current)
                current = None
            elif part.is_split and not part.why:
                if "IFS" in self._state.variables:
                    part = replace(part, why="the marks of IFS are not followed")
                    current = [*(current or []), part]
                    continue
                for index, piece in enumerate(re.split(r"[ \t\n]+", part.text)):
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
        is_pattern = is_field and not self._state.options & {"noglob"}
        if not why and is_pattern and re.search(r"[*?]|\[.*\]", bare, re.DOTALL) and not _NO_FILE.fullmatch(text):
            why = "which files it names is known only when the script runs"
        return Word(text, self._place, why, is_list)

"""The syntax tree of a bash script from tree-sitter-bash, with checks for errors of the grammar.

The grammar reports most code that it cannot parse, but silently misparses some here-documents and keywords. A statement
that fails a check here, and all statements after it, are not interpreted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import tree_sitter
import tree_sitter_bash

from posttrain_import.script import too_much

# Launch scripts nest five or six deep; parsing time grows with the square of the depth.
MOST_NESTED = 60
# Limits of here-documents and expansions; parsing time grows with the square of their number.
_MOST_OF = {"$": 5000, "`": 5000, "<<": 500}
_LANGUAGE = tree_sitter.Language(tree_sitter_bash.language())
_ONE_LINE = {"command", "declaration_command", "unset_command", "redirected_statement", "file_redirect"}
_GROUPS = {"do_group", "compound_statement", "subshell"}
_CHECKED = {*_ONE_LINE, *_GROUPS, "program", "list", "array"}
_RESERVED = {"then", "else", "elif", "fi", "do", "done", "esac", "in", "{", "}", "]]", "coproc", "function", "((", "))"}
_EMPTY = re.compile(r"\b(then|else)[\s;]+(fi|else|elif)\b|\b(if|elif)[\s;]+then\b")


class Misread(Exception):
    """The tree differs from bash's, or the code after it cannot be parsed."""


class Unclear(Exception):
    """The effect or value of a part of the script is unknown."""


class Code:
    """A node of the syntax tree.

    Args:
        node: The tree-sitter node.
        source: Bytes of the script.
        file: The script's name.
        first_line: Line of the file at which the bytes begin.
    """

    def __init__(self, node: tree_sitter.Node, source: bytes, file: str, first_line: int = 1):
        self.node, self.type, self.source, self.file, self._first = node, node.type, source, file, first_line
        self.line = first_line + node.start_point.row
        self.place = f"{file}:{self.line}"
        self.text = self.between(node.start_byte, node.end_byte)

    @property
    def parts(self) -> list[Code]:
        """All children except comments."""
        children = [child for child in self.node.children if child.type != "comment"]
        return [Code(child, self.source, self.file, self._first) for child in children]

    def between(self, start: int, end: int) -> str:
        """Return the source between two byte offsets."""
        return self.source[start:end].decode("utf-8", "replace")

    def walk(self) -> Iterator[Code]:
        """Yield this node and all its descendants."""
        nodes = [self]
        while nodes:
            yield nodes[-1]
            nodes += reversed(nodes.pop().parts)


def parse(text: str, file: str, first_line: int = 1) -> Code:
    """Return the tree of a script.

    Raises:
        ConfigError: It nests deeper, or has more expansions, than launch scripts do.
    """
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        if depth > MOST_NESTED:
            raise too_much(f"it nests more than {MOST_NESTED} deep")
    for mark, most in _MOST_OF.items():
        if text.count(mark) > most:
            raise too_much(f"it has more than {most} {mark}")
    source = text.encode() + b"\n"
    return Code(tree_sitter.Parser(_LANGUAGE).parse(source).root_node, source, file, first_line)


def check(code: Code) -> None:
    """Check one statement for known errors of the grammar.

    Raises:
        Misread: The statement has such an error.
    """
    if code.node.has_error or _EMPTY.search(code.text):
        raise Misread("bash's grammar is not understood here")
    for part in code.walk():
        if (part.type == "command_name" and part.text in _RESERVED) or (part.type in _GROUPS and len(part.parts) == 2):
            raise Misread("a keyword is not understood here")
        if part.type == "heredoc_redirect":
            _check_heredoc(part)
        if part.type in _CHECKED:
            _check_gaps(part)


def _check_gaps(code: Code) -> None:
    """Check that only blanks separate statements, and that something separates words."""
    end, before = code.node.start_byte, ""
    for child in code.node.children:
        gap = code.between(end, child.start_byte).replace("\\\n", "")
        # The grammar drops a lone dash before a here-document.
        if gap.strip() not in ("", "-"):
            raise Misread("something is left out here")
        is_prefix = code.type == "command" and before == "variable_assignment"
        if is_prefix and not gap:
            raise Misread("a word is cut here")
        parent = code.node.parent
        # The grammar attaches assignments on their own line to the next line's command.
        is_own_line = is_prefix and parent is not None and parent.type in ("program", "compound_statement")
        if code.type in _ONE_LINE and "\n" in gap and not is_own_line:
            raise Misread("a line's end is passed over")
        end, before = child.end_byte, child.type


def _check_heredoc(code: Code) -> None:
    """Check that the here-document ends where it does in bash, and is the only one on its line."""
    parts = {part.type: part for part in code.parts}
    start, end = parts.get("heredoc_start"), parts.get("heredoc_end")
    if start is None or end is None:
        raise Misread("a here-document is not understood here")
    marker = re.sub(r"""["'\\]""", "", start.text)
    head, _, document = code.between(start.node.end_byte, end.node.end_byte).partition("\n")
    lines = [line.lstrip("\t") if code.text.startswith("<<-") else line for line in document.split("\n")]
    follows = code.between(end.node.end_byte, end.node.end_byte + 1)
    if "<<" in head or marker not in lines or lines.index(marker) != len(lines) - 1 or follows not in ("\n", ""):
        raise Misread("a here-document ends elsewhere")


def words_of(parts: Sequence[Code]) -> Iterator[tuple[Code, str]]:
    """Yield the first node and the text of each word: adjacent nodes form one word."""
    gaps = [one.between(one.node.end_byte, other.node.start_byte) for one, other in itertools.pairwise(parts)]
    starts = [at for at, gap in enumerate(["first", *gaps][: len(parts)]) if gap.replace("\\\n", "")]
    for first, after in itertools.pairwise([*starts, len(parts)]):
        part = parts[first]
        yield part, part.between(part.node.start_byte, parts[after - 1].node.end_byte)


def statements(parts: Sequence[Code]) -> Iterator[tuple[Code, bool]]:
    """Yield each statement of a list, and whether it runs in the background."""
    for index, part in enumerate(parts):
        if part.node.is_named:
            yield part, index + 1 < len(parts) and parts[index + 1].type == "&"

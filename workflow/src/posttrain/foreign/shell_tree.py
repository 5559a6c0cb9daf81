"""The syntax tree of a bash script, as tree-sitter-bash has it, with checks of what the grammar gets wrong.

The grammar recovers from what it does not understand and says so, but it also misreads some here-documents and keywords
without a word. A statement that fails a check here, and all that follow it, are not interpreted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tree_sitter
import tree_sitter_bash

from posttrain.foreign.script import too_much

# Launch scripts nest five or six deep; the parser's time grows with the square of it.
MOST_NESTED = 60
# Here-documents and what is expanded in them: the parser's time grows with the square of their number.
_MOST_OF = {"$": 5000, "`": 5000, "<<": 500}
_MOST_MASKS = 5
_LANGUAGE = tree_sitter.Language(tree_sitter_bash.language())
_ONE_LINE = {"command", "declaration_command", "unset_command", "redirected_statement", "file_redirect"}
_RESERVED = {"then", "else", "elif", "fi", "do", "done", "esac", "in", "{", "}", "]]", "coproc", "function", "((", "))"}


class Misread(Exception):
    """The tree is not what bash would read."""


class Ends(Exception):
    """Bash ends the shell."""


class Unclear(Exception):
    """A statement is read, but what it does is not known."""


@dataclass(frozen=True)
class Code:
    """A node of the tree, with the script that it belongs to.

    Args:
        node: Of tree-sitter.
        source: The script's bytes.
        file: Its name.
        first_line: Of its text in that file.
    """

    node: tree_sitter.Node
    source: bytes
    file: str
    first_line: int

    @property
    def type(self) -> str:
        """The name of its kind in the grammar."""
        return self.node.type

    @property
    def text(self) -> str:
        """The source."""
        return self.between(self.node.start_byte, self.node.end_byte)

    @property
    def line(self) -> int:
        """The line in its file."""
        return self.first_line + self.node.start_point.row

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def parts(self) -> list[Code]:
        """All children but comments."""
        return [self.of(child) for child in self.node.children if child.type != "comment"]

    def of(self, node: tree_sitter.Node) -> Code:
        """Return another node of the same script."""
        return Code(node, self.source, self.file, self.first_line)

    def between(self, start: int, end: int) -> str:
        """Return the source between two places."""
        return self.source[start:end].decode("utf-8", "replace")


def parse(text: str, file: str, first_line: int = 1) -> Code:
    """Return the tree of a script.

    Raises:
        ConfigError: It nests deeper, or has more of something, than launch scripts do.
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
    code = Code(tree_sitter.Parser(_LANGUAGE).parse(source).root_node, source, file, first_line)
    masked = bytearray(source)
    for _ in range(_MOST_MASKS):
        before = bytes(masked)
        for node in _nodes(code.node):
            if node.type == "heredoc_start":
                first, last = document(code.of(node))
                masked[first:last] = re.sub(rb"[^\n]", b"x", masked[first:last])
        if masked == before:
            break
        # The grammar ends some documents too early, and reads what is in them.
        code = replace(code, node=tree_sitter.Parser(_LANGUAGE).parse(bytes(masked)).root_node)
    return code


def _nodes(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    nodes = [node]
    while nodes:
        node = nodes.pop()
        nodes += reversed(node.children)
        yield node


def document(start: Code) -> tuple[int, int]:
    """Return where the here-document begins and ends of which `start` is the marker; (0, 0): it does not end."""
    marker = re.sub(r"""["'\\]""", "", start.text).encode()
    has_tabs = start.source[: start.node.start_byte].rstrip(b" \t").endswith(b"<<-")
    place = first = start.source.find(b"\n", start.node.end_byte) + 1
    for line in start.source[place:].split(b"\n"):
        if (line.lstrip(b"\t") if has_tabs else line) == marker:
            return first, place
        place += len(line) + 1
    return 0, 0


def check(code: Code) -> None:
    """Look for what the grammar is known to misread in one statement.

    Raises:
        Misread: There is such a thing.
    """
    if code.node.has_error:
        raise Misread("bash's grammar is not understood here")
    for node in _nodes(code.node):
        if node.type == "command_name" and code.of(node).text in _RESERVED:
            raise Misread("a keyword is not understood here")
        if _is_empty(node):
            raise Misread("a branch or a loop has no command")
        if node.type == "heredoc_redirect":
            _check_heredoc(code.of(node))
        if node.type in _ONE_LINE or node.type in ("program", "list", "compound_statement", "do_group", "subshell"):
            _check_gaps(code.of(node))


def _is_empty(node: tree_sitter.Node) -> bool:
    """Tell whether a list of commands that bash does not accept without one has none."""
    kinds = [child.type for child in node.children if child.type not in ("comment", ";")]
    if node.type in ("do_group", "compound_statement", "subshell") and len(kinds) == 2:
        return True
    ends = {"fi", "then", "else_clause", "elif_clause", ""}
    return any(
        kind in ("if", "then", "else", "elif") and after in ends
        for kind, after in itertools.pairwise([*kinds, ""] if node.type.startswith(("if_", "el")) else [])
    )


def _check_gaps(code: Code) -> None:
    """Nothing but blanks lies between statements, and something lies between words."""
    end, before = code.node.start_byte, ""
    for child in code.node.children:
        gap = code.between(end, child.start_byte)
        # The grammar drops a lone dash before a here-document.
        if gap.replace("\\\n", "").strip() not in ("", "-"):
            raise Misread("something is left out here")
        if code.type == "command" and not gap.replace("\\\n", "") and before and child.type != "herestring_redirect":
            raise Misread("a word is cut here")
        if code.type in _ONE_LINE and "\n" in gap.replace("\\\n", "") and before != "variable_assignment":
            raise Misread("a line's end is passed over")
        end, before = child.end_byte, child.type


def _check_heredoc(code: Code) -> None:
    """The document ends where bash ends it."""
    parts = {part.type: part for part in code.parts}
    start, end = parts.get("heredoc_start"), parts.get("heredoc_end")
    if start is None or end is None:
        raise Misread("a here-document is not understood here")
    first, last = document(start)
    if b"<<" in code.source[start.node.end_byte : first]:
        raise Misread("several here-documents are not understood here")
    if not last or code.source[last : end.node.start_byte].strip(b"\t"):
        raise Misread("a here-document ends elsewhere")


def statements(parts: Sequence[Code]) -> Iterator[tuple[Code, bool]]:
    """Yield each statement of a list, and whether it runs in the background."""
    for index, part in enumerate(parts):
        if part.node.is_named:
            yield part, index + 1 < len(parts) and parts[index + 1].type == "&"

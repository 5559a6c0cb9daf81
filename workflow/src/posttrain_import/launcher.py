"""Python launch scripts with miles' layout: flags are concatenated as texts and passed to one call.

The source is parsed, and constants are propagated through dataclass defaults, names, f-strings, the launcher's own
functions, and branches with known conditions. Nothing is run or imported.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain_import.expression import RUNS, Piece, Text, Unknown, called, computed, constant, folded, text_of
from posttrain_import.script import PROGRAM, UNSET, Budget, Script, Word, flags_of, read_text, split_words

# Maximum depth of nested calls.
_DEEPEST = 5
# Placeholders for several flags instead of one value: {logging_args(args)}, {extra_args}.
_SEVERAL = re.compile(r"\{[\w.]*(args|flags)(\(.*\))?\}$", re.DOTALL)
# The keyword argument for flags in miles' launchers.
_FLAGS = "train_args"


def read_launcher(path: Path, known: Mapping[str, Any]) -> Script:
    """Return the flags that a Python launcher passes to the training.

    Args:
        path: The launcher.
        known: Fields that the user sets, such as `num_nodes`.

    Raises:
        ConfigError: The file is not valid Python.
    """
    text = read_text(path)
    try:
        tree = ast.parse(text)
        return flags_of(_Launcher(tree, path.name, text.splitlines(), known).words())
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        remedy = "give a launcher that Python can parse; bash scripts end in .sh"
        raise ConfigError(
            [Problem("not-python", str(path), f"{type(error).__name__}: {error}", "Python", remedy)]
        ) from None


class _Launcher:
    def __init__(self, tree: ast.Module, file: str, lines: Sequence[str], known: Mapping[str, Any]):
        self._file, self._lines, self._known = file, lines, known
        self._fields: dict[str, Any] = dict(known)
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._found: Text | None = None
        self._branches: list[str] = []
        self._budget, self._depth = Budget(), 0
        self._names: dict[str, Any] = {}
        self._run([node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))], self._names)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._read_class(node)
        for function in self._functions.values():
            if any(_starts_training(part) for part in ast.walk(function)):
                self._run(function.body, dict(self._names))
        self._run([node for node in tree.body if isinstance(node, (ast.Expr, ast.If))], self._names)

    def words(self) -> list[Word]:
        """Return the words of the flags; without a call, those of all texts named `..._args`."""
        if self._found is None:
            texts = [value for name, value in self._names.items() if name.lower().endswith("args")]
            self._found = Text(tuple(p for text in texts if isinstance(text, Text) for p in (*text.pieces, _SPACE)))
        return self._split(self._found)

    def _split(self, text: Text) -> list[Word]:
        """Return the words of a text; a word with an unknown piece is unknown.

        Python joins adjacent texts, so a flag's line is searched within the lines of its piece.
        """
        ends = list(itertools.accumulate(len(piece.text) for piece in text.pieces))
        found = []
        for start, spelled, plain in split_words("".join(piece.text for piece in text.pieces)):
            first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, start + len(spelled))
            pieces = text.pieces[first : last + 1]
            why = next((piece.why for piece in pieces if piece.why), "")
            is_list = bool(why) and bool(_SEVERAL.match(plain))
            numbers = range(pieces[0].line, pieces[0].last + 1)
            line = next((n for n in numbers if n > 0 and plain.partition("=")[0] in self._lines[n - 1]), numbers[0])
            found.append(Word(plain, f"{self._file}:{line}", why, is_list))
        return found

    def _read_class(self, node: ast.ClassDef) -> None:
        """Record the defaults of a class's fields, and run `__post_init__`."""
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                name = part.target.id
                missing = Unknown(f"{name} is given when the launcher is called")
                value = missing if part.value is None else self._value(part.value, self._names)
                if name in self._fields:
                    value = Unknown(f"several classes have {name}")
                self._fields[name] = self._known.get(name, value)
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__post_init__":
                self._run(part.body, dict(self._names))

    # ---- statements ----

    def _run(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> Any:
        """Interpret statements; return the value of the first `return`."""
        for node in body:
            if isinstance(node, ast.Return):
                value = self._value(node.value, names) if node.value else None
                return names.get(_MAY_RETURN, value)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, self._value(node.value, names), names)
            elif isinstance(node, ast.AnnAssign) and node.value:
                self._assign(node.target, self._value(node.value, names), names)
            elif isinstance(node, ast.AugAssign):
                found = self._binary(type(node.op), self._value(node.target, names), node.value, names)
                self._assign(node.target, found, names, is_more=True)
            elif isinstance(node, ast.Expr):
                self._value(node.value, names)
            elif isinstance(node, (ast.If, ast.For, ast.While, ast.Match)):
                returned = self._match(node, names) if isinstance(node, ast.Match) else self._block(node, names)
                if returned is not None:
                    return returned
            elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self._forget(node, names)
        return None

    def _forget(self, node: ast.AST, names: dict[str, Any]) -> None:
        """Mark variables that a skipped statement sets as unknown."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                names[part.id] = Unknown(f"line {part.lineno} sets it")

    def _match(self, node: ast.Match, names: dict[str, Any]) -> Any:
        """Interpret the case whose constants equal the subject."""
        subject = self._value(node.subject, names)
        for case in node.cases:
            fits = Unknown(RUNS) if case.guard else _fits(case.pattern, subject)
            if isinstance(fits, Unknown):
                break
            if fits:
                return self._run(case.body, names)
        else:
            return None
        self._branches.append(f"it depends on `match {ast.unparse(node.subject)[:60]}` in line {node.lineno}")
        for case in node.cases:
            self._run([part for part in case.body if not isinstance(part, ast.Return)], names)
        self._branches.pop()
        return None

    def _block(self, node: Any, names: dict[str, Any]) -> Any:
        condition: Any = Unknown("")
        if isinstance(node, ast.If):
            condition = self._value(node.test, names)
            if not isinstance(condition, (Unknown, Text)):
                return self._run(node.body if condition else node.orelse, names)
        told = ast.unparse(node.test if isinstance(node, (ast.If, ast.While)) else node.iter)[:60]
        self._branches.append(f"it depends on `{told}` in line {node.lineno}")
        if isinstance(node, ast.For):
            self._forget(node.target, names)
        if any(isinstance(part, ast.Return) for part in ast.walk(node)):
            names[_MAY_RETURN] = Unknown(self._branches[-1])
        for body in (node.body, node.orelse):
            # A `return` ends only this branch, which may not be taken.
            self._run([part for part in body if not isinstance(part, ast.Return)], names)
        self._branches.pop()
        return None

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any], is_more: bool = False) -> None:
        place, name = names, ""
        if isinstance(target, ast.Name):
            name = target.id
        elif isinstance(target, ast.Attribute):
            place, name = self._fields, target.attr
        if not name:
            self._forget(target, names)
        if not name or (place is self._fields and name in self._known):
            return
        if self._branches:
            before = place.get(name)
            old = before.pieces if isinstance(before, Text) else ()
            if isinstance(value, Text):
                new = value.pieces[len(old) :] if is_more else value.pieces
                value = Text((*old, *(replace(p, why=p.why or self._branches[-1]) for p in new)))
            else:
                value = Unknown(self._branches[-1])
        place[name] = value

    # ---- expressions ----

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return a plain value, a Text, a list of these, or Unknown."""
        value = self._found_value(node, names)
        self._budget.spend(20 + (len(value.pieces) if isinstance(value, Text) else 0))
        return value

    def _found_value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return text_of((_piece(node.value, node),)) if isinstance(node.value, str) else node.value
        if isinstance(node, ast.JoinedStr):
            return text_of(piece for part in node.values for piece in self._formatted(part, names))
        if isinstance(node, ast.Name):
            return names.get(node.id, Unknown(f"{UNSET} {node.id}"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self._fields.get(node.attr, Unknown(f"{UNSET} {node.attr}"))
        if isinstance(node, ast.BinOp):
            return self._binary(type(node.op), self._value(node.left, names), node.right, names)
        if isinstance(node, ast.Call):
            return self._call(node, names)
        return folded(node, lambda part: self._value(part, names))

    def _formatted(self, node: ast.expr, names: dict[str, Any]) -> Sequence[Piece]:
        if isinstance(node, ast.Constant):
            return (_piece(str(node.value), node),)
        assert isinstance(node, ast.FormattedValue)
        value = self._value(node.value, names) if node.format_spec is None else Unknown(RUNS)
        if isinstance(value, Text):
            return value.pieces
        spelled = "".join(char for char in ast.unparse(node.value) if not char.isspace() and char not in "'\"")
        if isinstance(value, Unknown):
            return (replace(_piece(f"{{{spelled}}}", node), why=value.why),)
        return (_piece(str(value), node),)

    def _binary(self, kind: type, left: Any, right_node: ast.expr, names: dict[str, Any]) -> Any:
        right = self._value(right_node, names)
        if kind is ast.Add and (isinstance(left, Text) or isinstance(right, Text)):
            spelled = _piece(f"{{{ast.unparse(right_node)[:60]}}}".replace(" ", ""), right_node)
            sides = [
                side.pieces if isinstance(side, Text) else (replace(spelled, why=getattr(side, "why", RUNS)),)
                for side in (left, right)
            ]
            return text_of((*sides[0], *sides[1]))
        unknown = next((side for side in (left, right) if isinstance(side, Unknown)), None)
        return unknown or computed(kind, left, right)

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        values = [self._value(part, names) for part in node.args]
        named = {part.arg: self._value(part.value, names) for part in node.keywords}
        self._look(node, values, named)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self._functions and self._depth < _DEEPEST:
            function = self._functions[name]
            self._depth += 1
            given = dict(zip((argument.arg for argument in function.args.args), values, strict=False))
            found = self._run(function.body, {**self._names, **given})
            self._depth -= 1
            return Unknown(RUNS) if found is None else found
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and values and isinstance(values[0], list):
            return _joined(values[0])
        plain = [constant(value) for value in values]
        unknown = next((value for value in plain if isinstance(value, Unknown)), None)
        if name == "str" and len(plain) == 1 and not unknown:
            return text_of((_piece(str(plain[0]), node),))
        return unknown or called(name or ast.unparse(node.func)[:60], plain)

    def _look(self, node: ast.Call, values: Sequence[Any], named: Mapping[str | None, Any]) -> None:
        """Store the text with which a call starts the training."""
        texts = [_joined(value) if isinstance(value, list) else value for value in (*values, *named.values())]
        for text in texts:
            if isinstance(text, Text) and any("train" in piece.text for piece in text.pieces):
                self._budget.spend(sum(len(piece.text) for piece in text.pieces))
                words = [word.text for word in self._split(text)]
                place = next((at for at, word in enumerate(words) if PROGRAM.search(word)), None)
                if place is not None:
                    self._found = _behind(text)
        if isinstance(named.get(_FLAGS), Text):
            self._found = named[_FLAGS]


_SPACE = Piece(" ", 0, 0)
_MAY_RETURN = "return"


def _piece(text: str, node: ast.expr) -> Piece:
    return Piece(text, node.lineno, node.end_lineno or node.lineno)


def _starts_training(node: ast.AST) -> bool:
    """Return whether a node passes flags to the training: it has their keyword or the program's name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return any(PROGRAM.search(word) for word in node.value.split())
    return isinstance(node, ast.keyword) and node.arg == _FLAGS


def _fits(pattern: ast.pattern, subject: Any) -> Any:
    """Return whether a pattern of constants matches a value, or Unknown."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return True if pattern.name is None else Unknown(RUNS)
    if isinstance(pattern, ast.MatchOr):
        found = [_fits(part, subject) for part in pattern.patterns]
        return next((fits for fits in found if isinstance(fits, Unknown) or fits), False)
    if isinstance(pattern, ast.MatchSequence) and isinstance(subject, list) and len(subject) == len(pattern.patterns):
        found = [_fits(part, item) for part, item in zip(pattern.patterns, subject, strict=True)]
        return next((fits for fits in found if isinstance(fits, Unknown) or not fits), True)
    value = constant(subject)
    if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
        return value if isinstance(value, Unknown) else value == pattern.value.value
    return Unknown(RUNS)


def _joined(values: Sequence[Any]) -> Any:
    """Return a list's texts joined with spaces."""
    texts = [value if isinstance(value, Text) else Text((Piece(str(value), 0, 0),)) for value in values]
    if any(isinstance(value, (Unknown, list)) for value in values):
        return Unknown(RUNS)
    return text_of(piece for text in texts for piece in (*text.pieces, _SPACE))


def _behind(text: Text) -> Text:
    """Return the text after the training's program."""
    for index, piece in enumerate(text.pieces):
        place = piece.text.find(".py")
        if not piece.why and place >= 0 and any(PROGRAM.search(word) for word in piece.text.split()):
            return Text((replace(piece, text=piece.text[place + 3 :]), *text.pieces[index + 1 :]))
    return Text()

"""Makes mutants of a module: the same text with one small edit that a test should notice.

Each edit replaces the text of one node of the syntax tree, so that all lines keep their numbers. Kinds:

    comparison   <  to  <=, and to its negation; == to !=, in to not in, is to is not
    condition    if x  to  if not x; and to or; not x to x
    off by one   n  to  n + 1, for whole numbers; True to False
    constant     other numbers to twice themselves plus one
    min/max      min(...) to max(...), minimum to maximum, any to all, and back
    sign         + to -, * to /, // to %, -x to x, += to -=
    dropped      a statement to `pass`; a returned value to None
    swapped      two neighbouring arguments of a call, where their order means something
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
OPPOSITES = {
    "min": "max",
    "minimum": "maximum",
    "amin": "amax",
    "any": "all",
    "floor": "ceil",
    "argmin": "argmax",
}
OPPOSITES |= {new: old for old, new in OPPOSITES.items()}
# The order of their arguments is of no meaning.
COMMUTATIVE = {"min", "max", "minimum", "maximum", "gcd", "hypot", "isclose"} | {
    # Of reward/equality and reward/expression: that they have no sides is a test of its own.
    *("are_equal", "same_value", "_same", "_same_at_points", "_same_rows", "_same_statements", "_same_texts"),
    "_same_values",
}


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Args:
        kind: See the head of this file.
        line: Of the source, from 1.
        before: The text that is replaced.
        after: What stands there instead.
        start: Its offset in the source, in characters.
        number: From 1, among those of the same text.
    """

    kind: str
    line: int
    before: str
    after: str
    start: int
    number: int = 1

    def apply(self, source: str) -> str:
        """Return the module with the edit."""
        end = self.start + len(self.before)
        assert source[self.start : end] == self.before
        return source[: self.start] + self.after + source[end:]

    def key(self, source: str) -> str:
        """Return a name that stays while the function around it stays: of the line's text, not of its number."""
        line = source.splitlines()[self.line - 1].strip()
        content = "\0".join([self.kind, line, self.before, self.after])
        name = hashlib.sha256(content.encode()).hexdigest()[:10]
        return name if self.number == 1 else f"{name}-{self.number}"


def mutants_of(source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its text."""
    tree, offsets = ast.parse(source), _line_offsets(source)
    found = []
    for node, kind, replacement in _edits(tree):
        start = offsets[node.lineno - 1] + _characters(source, node.lineno, node.col_offset)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = offsets[node.end_lineno - 1] + _characters(source, node.end_lineno, node.end_col_offset)
        before = source[start:end]
        # A node over several lines becomes one line: blank ones behind it keep the numbers of what follows.
        after = replacement if isinstance(replacement, str) else ast.unparse(replacement)
        if isinstance(node, ast.expr) and not isinstance(replacement, str):
            after = f"({after})"
        found.append(Mutant(kind, node.lineno, before, after, start))
    keys, numbered = Counter[str](), []
    for mutant in sorted(set(found), key=lambda mutant: (mutant.start, mutant.kind, mutant.after)):
        keys[mutant.key(source)] += 1
        numbered.append(dataclasses.replace(mutant, number=keys[mutant.key(source)]))
    return numbered


def lines_of(source: str, functions: Collection[str]) -> set[int]:
    """Return the numbers of the lines of some functions, from 1."""
    defined = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    chosen = [node for node in defined if node.name in functions]
    assert {node.name for node in chosen} == set(functions)
    return {line for node in chosen for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def _edits(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST | str]]:
    """Yield (node, kind, what replaces it) of every edit."""
    skipped = _texts_about_code(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.stmt):
            yield from _statement_edits(node)
        elif isinstance(node, ast.expr):
            yield from _expression_edits(node)


def _texts_about_code(tree: ast.Module) -> set[int]:
    """Return the nodes that decide nothing: docstrings, annotations, imports, what a class or module is made of."""
    skipped: set[int] = set()

    def skip(node: ast.AST | None) -> None:
        if node is not None:
            skipped.update(id(inner) for inner in ast.walk(node))

    for node in ast.walk(tree):
        has_text = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_text and ast.get_docstring(node, clean=False) is not None:
            skip(node.body[0])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skip(node.returns)
            for decorator in node.decorator_list:
                skip(decorator)
        if isinstance(node, ast.arg | ast.AnnAssign):
            skip(node.annotation)
        if isinstance(node, ast.ClassDef):
            for base in [*node.bases, *node.decorator_list]:
                skip(base)
    return skipped


def _statement_edits(node: ast.stmt) -> Iterator[tuple[ast.stmt | ast.expr, str, ast.AST | str]]:
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "dropped", "return None"
    elif _does_something(node):
        yield node, "dropped", "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in SIGNS:
        changed = copy.deepcopy(node)
        changed.op = SIGNS[type(node.op)]()
        yield node, "sign", changed
    if isinstance(node, ast.If | ast.While):
        yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)


def _does_something(node: ast.stmt) -> bool:
    """Tell whether a statement can be left out; without an assignment of a name there would be no program."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Constant)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _expression_edits(node: ast.expr) -> Iterator[tuple[ast.expr, str, ast.AST | str]]:
    if isinstance(node, ast.Compare):
        yield from _comparison_edits(node)
    elif isinstance(node, ast.BoolOp):
        yield node, "condition", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.IfExp):
        yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node, "condition" if isinstance(node.op, ast.Not) else "sign", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not _is_text(node):
        yield node, "sign", ast.BinOp(node.left, SIGNS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant):
        yield from _constant_edits(node)
    elif isinstance(node, ast.Call):
        yield from _call_edits(node)


def _comparison_edits(node: ast.Compare) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            operators = [*node.ops[:place], other(), *node.ops[place + 1 :]]
            yield node, "comparison", ast.Compare(node.left, operators, node.comparators)


def _constant_edits(node: ast.Constant) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield node, "off by one", ast.Constant(not value)
    elif isinstance(value, int):
        yield node, "off by one", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield node, "constant", ast.Constant(2 * value + 1)


def _call_edits(node: ast.Call) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in OPPOSITES:
        changed = copy.deepcopy(node)
        if isinstance(changed.func, ast.Attribute):
            changed.func.attr = OPPOSITES[name]
        elif isinstance(changed.func, ast.Name):
            changed.func.id = OPPOSITES[name]
        yield node, "min/max", changed
    for place in range(0 if name in COMMUTATIVE else len(node.args) - 1):
        if ast.dump(node.args[place]) != ast.dump(node.args[place + 1]):
            changed = copy.deepcopy(node)
            changed.args[place], changed.args[place + 1] = changed.args[place + 1], changed.args[place]
            yield node, "swapped", changed


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    """Tell whether an operator joins or formats texts, where another one is no program."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def _line_offsets(source: str) -> list[int]:
    offsets, total = [], 0
    for line in source.splitlines(keepends=True):
        offsets.append(total)
        total += len(line)
    return offsets


def _characters(source: str, line: int, utf8_column: int) -> int:
    """Return the column in characters of one that `ast` counts in bytes."""
    return len(source.splitlines()[line - 1].encode()[:utf8_column].decode())

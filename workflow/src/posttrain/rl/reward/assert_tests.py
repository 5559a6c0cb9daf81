"""Splits a text of asserts into what a solution computes and what is asserted about it.

A program that runs in one process with its asserts can make them pass: by an object that equals everything, by leaving
early. So the solution's sandbox evaluates only expressions such as `f(3)`, and returns plain values. Another sandbox,
in which no line of the solution runs, evaluates the asserts with these values in their places.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass

# Stands for the list of values in an assert.
VALUES = "_values"
Step = tuple[str, str]


@dataclass(frozen=True)
class AssertTests:
    """A text of asserts in two parts.

    Args:
        steps: ("exec", statement) and ("eval", expression), in order, for the solution's sandbox.
        checks: Statements and asserts for the other sandbox, where `VALUES` has the value of each "eval".
        num_asserts: Their number.
    """

    steps: tuple[Step, ...]
    checks: tuple[str, ...]
    num_asserts: int


def split_asserts(text: str, entry_point: str = "") -> AssertTests:
    """Split a text of asserts, at top level or in `def check(candidate)`.

    Args:
        text: Python.
        entry_point: The function that `candidate` stands for; empty: the text itself calls `check` with it.

    Raises:
        ValueError: It is something else, or an assert says nothing about the solution.
    """
    try:
        statements = _statements(ast.parse(text), entry_point)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are no Python: {error}") from error
    splitter = _Splitter(statements)
    for statement in statements:
        splitter.add(statement)
    if not splitter.num_asserts:
        raise ValueError("the tests assert nothing")
    return splitter.split()


def _statements(tree: ast.Module, entry_point: str) -> list[ast.stmt]:
    """Return the statements, those of `check` in its place."""
    found: list[ast.stmt] = []
    check: ast.FunctionDef | None = None
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name="check"):
                check = statement
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)])):
                entry_point = name
            case ast.ImportFrom(names=[ast.alias("*")]):
                raise ValueError(f"line {statement.lineno} of the tests imports names that it does not tell")
            case ast.Assert() | ast.Assign() | ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
                found.append(statement)
            case _:
                raise ValueError(f"line {statement.lineno} of the tests is no assert, assignment or import")
    if check is None:
        return found
    if len(check.args.args) != 1 or not entry_point:
        raise ValueError("check takes one function, which the column entry_point names")
    parameter, body = check.args.args[0].arg, ast.Module(check.body, [])
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and node.id == parameter:
            node.id = entry_point
    return [*found, *_statements(body, "")]


class _Splitter:
    """Assigns statements to the two sandboxes.

    Args:
        statements: All of them.
    """

    def __init__(self, statements: Sequence[ast.stmt]):
        # A name that the tests do not define is the solution's, unless Python has it.
        self._own = set(dir(builtins))
        self._steps: list[tuple[Step, set[str]]] = []
        self._checks: list[str] = []
        self._plain: list[tuple[int, ast.stmt]] = []
        self._num_values = self.num_asserts = 0

    def add(self, statement: ast.stmt) -> None:
        """Add the next statement."""
        if isinstance(statement, ast.Assert):
            before = self._num_values
            self._checks.append(ast.unparse(ast.fix_missing_locations(_Replaced(self).visit(statement))))
            self.num_asserts += 1
            if self._num_values == before:
                raise ValueError(f"line {statement.lineno} of the tests asserts nothing about the solution")
        elif self._is_the_solutions(statement):
            # What it assigns depends on the solution, and is asked for like any other value.
            self._own -= _assigned(statement)
            self._steps.append((("exec", ast.unparse(statement)), _loaded(statement)))
        else:
            self._own |= _assigned(statement)
            self._plain.append((len(self._steps), statement))
            self._checks.append(ast.unparse(statement))

    def replace(self, node: ast.expr) -> ast.expr:
        """Return what stands for the value of an expression of the solution's."""
        self._steps.append((("eval", ast.unparse(node)), _loaded(node)))
        place = ast.Constant(self._num_values)
        self._num_values += 1
        return ast.Subscript(ast.Name(VALUES, ast.Load()), place, ast.Load())

    def is_root(self, node: ast.expr) -> bool:
        """Return whether an expression begins with a name of the solution's."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id not in self._own

    def split(self) -> AssertTests:
        """Return both parts. Expected values that the solution's sandbox does not need stay out of it."""
        needed = {name for _, names in self._steps for name in names}
        steps = [step for step, _ in self._steps]
        for place, statement in reversed(self._plain):
            if _assigned(statement) & needed:
                needed |= _loaded(statement)
                steps.insert(place, ("exec", ast.unparse(statement)))
        return AssertTests(tuple(steps), tuple(self._checks), self.num_asserts)

    def _is_the_solutions(self, statement: ast.stmt) -> bool:
        return bool(_loaded(statement) - self._own)


class _Replaced(ast.NodeTransformer):
    """Puts values in the places of the largest expressions that begin with a name of the solution's."""

    def __init__(self, splitter: _Splitter):
        self._splitter = splitter

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Lambda | ast.comprehension):
            raise ValueError("the tests have a loop or a function of their own, whose names cannot be told apart")
        if isinstance(node, ast.expr) and self._splitter.is_root(node):
            return self._splitter.replace(node)
        return self.generic_visit(node)


def _loaded(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}

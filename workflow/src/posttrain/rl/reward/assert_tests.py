"""Splits a text of asserts into what a solution computes and what is asserted about it.

A program that runs in one process with its asserts can make them pass: by an object that equals everything, by leaving
early. So the solution's sandbox evaluates only expressions such as `f(3)`, and returns plain values. Another sandbox,
in which no line of the solution runs, evaluates the asserts with these values in their places.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from symtable import SymbolTable, symtable
from typing import Any

# Stands for the list of values in an assert.
VALUES = "_values"
# Repetitions of a loop.
_MAX_REPETITIONS = 1000
# Sources of chance that have a state of their own, or none that can be set.
_UNREPEATABLE = {"Random", "SystemRandom", "secrets", "uuid", "urandom"}
# What an assignment can store, and what reads names only later.
_DEFERRED = {"lambda", "genexpr"}
# Expressions with names of their own.
_Scope = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda
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
        ValueError: It is something else, an assert says nothing about the solution, or the two cannot be parted.
    """
    try:
        symtable(text, "tests", "exec")  # it refuses more than the parser does
        statements, entry_point = _statements(ast.parse(text), entry_point)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are no Python: {error}") from error
    splitter = _Splitter([*_modules(statements), *statements], entry_point)
    if not splitter.num_asserts:
        raise ValueError("the tests assert nothing")
    return splitter.split()


def _statements(tree: ast.Module, entry_point: str) -> tuple[list[ast.stmt], str]:
    """Return the statements, those of `check` and of loops in their places, and the entry point."""
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
            case ast.Assert(ast.Constant(value)) if value:
                pass
            case ast.Expr(ast.Constant() | ast.Name()):
                pass
            case ast.Assert() | ast.Assign() | ast.Import() | ast.ImportFrom():
                found.append(statement)
            case ast.For():
                found += _statements(ast.Module(_repeated(statement), []), "")[0]
            case _:
                raise ValueError(f"line {statement.lineno} of the tests is no assert, assignment or import")
    if check is None:
        return found, entry_point
    if len(check.args.args) != 1 or not entry_point:
        raise ValueError("check takes one function, which the column entry_point names")
    body = ast.Module(check.body, [])
    _Renamed(check.args.args[0].arg, ast.Name(entry_point, ast.Load())).visit(body)
    return [*found, *_statements(body, "")[0]], entry_point


def _repeated(loop: ast.For) -> list[ast.stmt]:
    """Return the statements that a loop over a range of constants repeats."""
    match loop:
        case ast.For(ast.Name(name), ast.Call(ast.Name("range"), bounds, []), _, []):
            try:
                numbers = range(*map(ast.literal_eval, bounds))
            except (ValueError, TypeError):
                numbers = range(0)
            if 0 < len(numbers) * len(loop.body) <= _MAX_REPETITIONS and all(
                isinstance(one, ast.Assert | ast.Assign) for one in loop.body
            ):
                return [
                    _Renamed(name, ast.Constant(number)).visit(copy.deepcopy(one))
                    for number in numbers
                    for one in loop.body
                ]
    raise ValueError(
        f"line {loop.lineno} of the tests is a loop, but not of asserts and assignments over a short range"
    )


class _Renamed(ast.NodeTransformer):
    """Puts an expression in the places where a name is read."""

    def __init__(self, name: str, value: ast.expr):
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_one = node.id == self._name and isinstance(node.ctx, ast.Load)
        return ast.copy_location(copy.copy(self._value), node) if is_one else node


def _modules(statements: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Return imports of the standard modules that the tests use as such, and leave to the solution to import."""
    tree = ast.Module(list(statements), [])
    defined = {name for statement in statements for name in _assigned(statement)}
    bases = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id in sys.stdlib_module_names]
    others = {one.id for one in names if id(one) not in bases}
    used = sorted({one.id for one in names} - others - defined)
    return [ast.Import([ast.alias(name)], lineno=0) for name in used]


class _Splitter:
    """Assigns statements to the two sandboxes.

    Args:
        statements: All of them.
        entry_point: The function that they test; "" if it is not named.
    """

    def __init__(self, statements: Sequence[ast.stmt], entry_point: str):
        # A name that the tests do not define is the solution's, unless Python has it.
        self._own = set(dir(builtins)) - {entry_point}
        self._entry_point = entry_point
        # Names that tests compute from values of the solution, outside of its sandbox.
        self._outside: set[str] = set()
        # Names of functions that draw at random, and statements that have done so.
        self._random: set[str] = set()
        self._num_draws = 0
        self._steps: list[_Step] = []
        self._checks: list[str] = []
        self._num_values = self.num_asserts = 0
        for statement in statements:
            self._line = statement.lineno
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assert):
            before, says = self._num_values, bool(_free(statement.test) & self._outside)
            self._checks.append(ast.unparse(ast.fix_missing_locations(_Replaced(self).visit(statement))))
            self.num_asserts += 1
            if self._num_values == before and not says:
                raise ValueError(f"line {statement.lineno} of the tests asserts nothing about the solution")
        elif not _free(statement) - self._own and not _free(statement) & self._outside:
            self._add_plain(statement)
        elif isinstance(statement, ast.Assign) and self._is_computed(statement.value):
            names = _assigned(statement)
            if not all(isinstance(one, ast.Name) for one in statement.targets):
                raise ValueError(
                    f"line {statement.lineno} of the tests computes with the solution's values in one step"
                )
            if names & self._own - self._outside:
                raise ValueError(
                    f"line {statement.lineno} of the tests assigns anew what did not depend on the solution"
                )
            statement.value = _Replaced(self).visit(statement.value)
            self._checks.append(ast.unparse(ast.fix_missing_locations(statement)))
            self._own |= names
            self._outside |= names
        else:
            # What it assigns depends on the solution, and is asked for like any other value.
            self._check_inside(statement)
            self._own -= _assigned(statement)
            self._outside -= _assigned(statement)
            self._steps.append(_Step("exec", ast.unparse(statement), statement))

    def _add_plain(self, statement: ast.stmt) -> None:
        text, names, loaded = ast.unparse(statement), _assigned(statement), _loaded(statement)
        words = loaded | {one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)}
        if words & _UNREPEATABLE:
            raise ValueError(f"line {statement.lineno} of the tests draws at random what cannot be drawn twice")
        if isinstance(statement, ast.Import | ast.ImportFrom):
            origin = [statement.module] if isinstance(statement, ast.ImportFrom) else [n.name for n in statement.names]
            self._random |= names if "random" in origin else set()
        elif loaded & self._random:
            # Both sandboxes draw the same, whatever else they draw.
            self._num_draws += 1
            text = f"__import__('random').seed({self._num_draws})\n{text}"
        self._own |= names
        self._outside -= names
        self._steps.append(_Step("exec", text, statement, is_plain=True))
        self._checks.append(text)

    def _is_computed(self, value: ast.expr) -> bool:
        """Return whether the tests compute with a value of the solution; otherwise it is one, or a list of some."""
        if isinstance(value, ast.List | ast.Tuple):
            return any(map(self._is_computed, value.elts))
        return bool((_free(value) - self._own) | (_free(value) & self._outside)) and not self.is_root(value)

    def _check_inside(self, node: ast.AST) -> None:
        """Refuse what would bring expected values into the solution's sandbox."""
        if _free(node) & self._outside:
            raise ValueError(f"line {self._line} of the tests gives the solution what was computed outside its sandbox")
        for one in ast.walk(node):
            if isinstance(one, ast.Call) and isinstance(name := _root(one), ast.Name) and self._mixes(name.id, one):
                raise ValueError(f"line {self._line} of the tests calls {name.id} with values of the solution's")

    def _mixes(self, root: str, call: ast.Call) -> bool:
        """Return whether a call's arguments hold values of another function than the one that is called."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if root == self._entry_point or root in self._own:
            return False
        if self._entry_point:
            return any(_free(one) - self._own for one in arguments)
        calls = [one for argument in arguments for one in ast.walk(argument) if isinstance(one, ast.Call)]
        roots = {base.id for one in calls if isinstance(base := _root(one), ast.Name)}
        return bool(roots - self._own - {root})

    def replace(self, node: ast.expr) -> ast.expr:
        """Return what stands for the value of an expression of the solution's."""
        self._check_inside(node)
        self._steps.append(_Step("eval", ast.unparse(node), node))
        place = ast.Constant(self._num_values)
        self._num_values += 1
        return ast.Subscript(ast.Name(VALUES, ast.Load()), place, ast.Load())

    def is_root(self, node: ast.expr) -> bool:
        """Return whether an expression begins with a name of the solution's."""
        base = _root(node)
        return isinstance(base, ast.Name) and base.id not in self._own

    def has_solution(self, node: ast.AST) -> bool:
        """Return whether an expression reads a name of the solution's."""
        return bool(_free(node) - self._own)

    def split(self) -> AssertTests:
        """Return both parts. Expected values that the solution's sandbox does not need stay out of it."""
        deferred: set[str] = set()
        kept = self._kept(deferred)
        while more := {name for step in kept for name in step.deferred} - deferred:
            deferred |= more
            kept = self._kept(deferred)
        return AssertTests(tuple((step.kind, step.text) for step in kept), tuple(self._checks), self.num_asserts)

    def _kept(self, deferred: set[str]) -> list[_Step]:
        """Return the steps without those that assign only what no later step reads before it is assigned anew.

        Args:
            deferred: Names that may be read at any time.
        """
        kept: list[_Step] = []
        wanted = set(deferred)
        for step in reversed(self._steps):
            if not step.is_plain or step.changed & wanted:
                wanted = (wanted - step.assigned) | step.read | deferred
                kept.insert(0, step)
        return kept


class _Step:
    """A step of the solution's sandbox, and the names that it uses.

    Args:
        kind: "exec" or "eval".
        text: Python.
        node: The same without what has been put before it.
        is_plain: Whether it depends on nothing of the solution's, so that the sandbox may do without.
    """

    def __init__(self, kind: str, text: str, node: ast.AST, is_plain: bool = False):
        self.kind, self.text, self.is_plain = kind, text, is_plain
        table = symtable(ast.unparse(node), "tests", "exec")
        symbols, inner = table.get_symbols(), list(_inner(table))
        self.read = {one.get_name() for one in symbols if one.is_referenced()}.union(*map(_global_names, inner))
        stored = [one for one in inner if kind == "exec" and one.get_name() in _DEFERRED]
        self.deferred = {name for one in stored for part in (one, *_inner(one)) for name in _global_names(part)}
        self.assigned = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
        self.changed = self.assigned | _changed_inside(node)


def _inner(table: SymbolTable) -> Iterator[SymbolTable]:
    """Yield the scopes within one."""
    for one in table.get_children():
        yield one
        yield from _inner(one)


def _global_names(table: SymbolTable) -> set[str]:
    return {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}


def _changed_inside(node: ast.AST) -> set[str]:
    """Return the names of objects of which an item or an attribute is assigned."""
    targets = [one for one in ast.walk(node) if isinstance(one, ast.Subscript | ast.Attribute)]
    roots = [_root(one) for one in targets if isinstance(one.ctx, ast.Store)]
    return {root.id for root in roots if isinstance(root, ast.Name)}


class _Replaced(ast.NodeTransformer):
    """Puts values in the places of the largest expressions that begin with a name of the solution's."""

    def __init__(self, splitter: _Splitter):
        self._splitter = splitter

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _Scope):
            if not self._splitter.has_solution(node):
                return node
            raise ValueError("the tests have a loop or a function of their own, whose names cannot be told apart")
        if isinstance(node, ast.expr) and self._splitter.is_root(node):
            return self._splitter.replace(node)
        return self.generic_visit(node)


def _root(node: ast.expr) -> ast.expr:
    """Return what an expression of calls, attributes and subscripts begins with."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _free(node: ast.AST) -> set[str]:
    """Return the names that an expression or statement reads, without those of its comprehensions and lambdas."""
    bound = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    for one in ast.walk(node):
        bound |= _assigned(one.target) if isinstance(one, ast.comprehension) else set()
    return _loaded(node) - bound


def _loaded(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _assigned(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}

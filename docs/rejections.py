"""The codes of all rejections, read from the source that raises them.

`docs/site.py` makes a page of them, and `tests/test_rejections.py` checks them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What a class rejects.
KINDS = {"Problem": "configuration or input", "CheckpointError": "checkpoint, receipt or record"}
PAGE = """# Codes of rejections

Each rejection ends its first line with a code, such as `[unknown-key]`; in `plan.json` it stands beside the key. Codes
are stable, so scripts may match them. The sentences around them may change.

| code | what is rejected | by |
|---|---|---|
{rows}
"""
_IN_RULES = re.compile(r'\b(Problem|CheckpointError)\(\s*"([^"]*)"')


class Raised(NamedTuple):
    """A place that rejects something: its class, the code ("" where none can be read) and "path:line"."""

    kind: str
    code: str
    place: str


def find_rejections(root: Path) -> list[Raised]:
    """Return all places of a repository that make a `Problem` or a `CheckpointError`, also by a helper."""
    paths = sorted(path for folder in ("workflow/src", "scripts") for path in (root / folder).rglob("*.py"))
    trees = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    shared = {name: kind for tree in trees.values() for name, kind in _helpers(tree) if not name.startswith("_")}
    found = [raised for path, tree in trees.items() for raised in _raised(tree, shared, path)]
    for path in sorted((root / "workflow/rules").glob("*.smk")):
        matches = _IN_RULES.finditer(path.read_text(encoding="utf-8"))
        found += [Raised(match[1], match[2], str(path.relative_to(root))) for match in matches]
    return found


def render_page(root: Path) -> str:
    """Return the page of all codes."""
    places: dict[tuple[str, str], list[str]] = {}
    for kind, code, place in find_rejections(root):
        names = places.setdefault((code, kind), [])
        if (name := Path(place.partition(":")[0]).stem) not in names:
            names.append(name)
    rows = [f"| `{code}` | {KINDS[kind]} | {', '.join(names)} |" for (code, kind), names in sorted(places.items())]
    return PAGE.format(rows="\n".join(rows))


def _helpers(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield functions that pass on their first parameter as the code, and the class that they pass it to."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.args.args:
            first = function.args.args[0].arg
            yield from (
                (function.name, _name_of(call))
                for call in ast.walk(function)
                if isinstance(call, ast.Call) and _name_of(call) in KINDS and _is_name(_code_of(call), first)
            )


def _raised(tree: ast.Module, shared: dict[str, str], path: Path) -> Iterator[Raised]:
    kinds = {kind: kind for kind in KINDS} | _imported(tree, shared) | dict(_helpers(tree))
    passed = {function.args.args[0].arg for function in ast.walk(tree) if _is_helper(function, kinds)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _name_of(call) not in kinds:
            continue
        code = _code_of(call)
        # A helper's parameter, the code of another rejection, or one that was read from JSON.
        if any(_is_name(code, name) for name in passed) or isinstance(code, ast.Attribute) or call.keywords:
            continue
        text = code.value if isinstance(code, ast.Constant) and isinstance(code.value, str) else ""
        yield Raised(kinds[_name_of(call)], text, f"{path}:{call.lineno}")


def _imported(tree: ast.Module, shared: dict[str, str]) -> dict[str, str]:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {name: shared[name] for name in names if name in shared}


def _is_helper(node: ast.AST, kinds: dict[str, str]) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in kinds and bool(node.args.args)


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _code_of(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args else None


def _is_name(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name

"""Sources of the user's that a configuration names: `path.py:name`. They are read here and never executed."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from posttrain.errors import ConfigError, Problem

# At the top level of a source: other files that it depends on, relative to its folder.
NAMED_FILES = ("REWARD_FILES", "ENVIRONMENT_FILES")


class OwnSource(NamedTuple):
    """A source of the user's.

    Args:
        path: The file.
        name: What the configuration names in it.
        content: Its bytes.
        tree: Its syntax.
    """

    path: str
    name: str
    content: bytes
    tree: ast.Module


def read_source(text: str) -> OwnSource:
    """Read the file that `path.py:name` names.

    Raises:
        OSError: It cannot be read.
        SyntaxError, ValueError: It is no Python.
    """
    path, _, name = text.rpartition(":")
    content = Path(path).read_bytes()
    return OwnSource(path, name, content, ast.parse(content, path))


def refused(code: str, key: str, value: str, allowed: str, remedy: str) -> ConfigError:
    """Return an error with one problem."""
    return ConfigError([Problem(code, key, value, allowed, remedy)])


def digest_of(path: str, content: bytes, key: str = "data.reward") -> str:
    """Return the digest of a source and of the files that it names, in order.

    Raises:
        ConfigError: One of them is missing.
    """
    digest = hashlib.sha256(content)
    for variable, name in _named_files(ast.parse(content, path), path, key):
        try:
            named = (Path(path).parent / name).read_bytes()
        except OSError as error:
            found = f"{variable} of {path}: {error}"
            raise refused("no-such-file", key, found, "files that are there", "correct it") from error
        # Each with its length, so that a byte cannot move from one file to the next.
        digest.update(b"%d:%s" % (len(named), named))
    return digest.hexdigest()


def _named_files(tree: ast.Module, path: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield the files that a source names, each with the variable that names it."""
    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        for variable in {getattr(target, "id", "") for target in node.targets} & {*NAMED_FILES}:
            try:
                names = ast.literal_eval(node.value)
            except ValueError:
                names = None
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                allowed = "a list of texts that is written out: what a plan reads, it does not execute"
                found = f"{variable} in line {node.lineno} of {path}"
                raise refused("names-not-literal", key, found, allowed, "write the names out")
            yield from ((variable, name) for name in names)

"""What `data.environment` may name, and what a plan has to know of a user's environment, `path.py:Class`.

Its source is read and not executed. Its digest covers the file and those that it names in `ENVIRONMENT_FILES`.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.config.own_source import digest_of, read_source, refused

KEY = "data.environment"
# Environments that come with posttrain (`rl.environments.built_in`), and how the address of a service begins.
BUILT_IN = ("calculator", "python")
SCHEMES = ("http", "https", "openenv+http", "openenv+https", "nemo_gym+http", "nemo_gym+https")
# Method -> the parameters that it is called with.
METHODS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("seed",),
    "reset": ("row",),
    "step": ("action",),
    "reward": ("trajectory",),
    "close": (),
    "perfect": ("row",),
}
OPTIONAL = ("close", "perfect")
_SANDBOX = "posttrain.sandbox."
_ALLOWED = ", ".join(f"{name}(self{''.join(f', {given}' for given in names)})" for name, names in METHODS.items())
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_address(environment: str) -> bool:
    """Return whether `data.environment` is the address of a service."""
    return "://" in environment


def is_own(environment: str) -> bool:
    """Return whether `data.environment` is a class of the user's, `path.py:Class`."""
    return not is_address(environment) and (":" in environment or environment.endswith(".py"))


@dataclass(frozen=True)
class OwnEnvironment:
    """An environment of the user's.

    Args:
        path: The source.
        name: The class's.
        digest: Of the source and the files that it names, SHA-256 in hex.
    """

    path: str
    name: str
    digest: str


def inspect_environment(text: str, key: str = KEY) -> OwnEnvironment:
    """Find the class that `path.py:Class` names, without executing anything.

    Args:
        text: What the configuration says.
        key: Where it says so, for the message.

    Raises:
        ConfigError: There is no such file or class, it is no Python, a file that it names is missing, or a method is
            missing or cannot be called with its parameters.
    """
    try:
        path, name, content, tree = read_source(text)
    except (OSError, SyntaxError, ValueError) as error:
        allowed = "path.py:Class, from the folder in which the workflow runs"
        raise refused("environment-unreadable", key, f"{text!r}: {error}", allowed, "correct path or source") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        allowed = f"a class at the top level of {path}: {', '.join(classes) or 'none'}"
        raise refused("no-such-class", key, repr(text), allowed, "correct the name")
    methods, is_complete = _methods_of(classes[name], classes)
    needed = [method for method in METHODS if method not in OPTIONAL]
    if is_complete and (missing := [method for method in needed if method not in methods]):
        found = f"{name} without {', '.join(missing)}"
        raise refused("environment-methods", key, found, f"a class with {_ALLOWED}", f"write {', '.join(missing)}")
    for method, given in METHODS.items():
        if method in methods and not _takes(methods[method], 1 + len(given)):
            arguments = ast.unparse(methods[method].args)
            remedy = f"write def {method}({', '.join(('self', *given))})"
            raise refused("environment-signature", key, f"{name}.{method}({arguments})", _ALLOWED, remedy)
    return OwnEnvironment(path, name, digest_of(path, content, key))


def imports_sandbox(text: str) -> bool:
    """Return whether the file that `path.py:Class` names imports `posttrain.sandbox`; False if it cannot be read."""
    names: list[str] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # told when a configuration is resolved
        for node in ast.walk(read_source(text).tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith(_SANDBOX) for name in names)


def _methods_of(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> tuple[dict[str, Function], bool]:
    """Return a class's methods by name, inherited ones included, and whether the source shows them all."""
    methods: dict[str, Function] = {}
    is_complete = not node.decorator_list and not node.keywords
    for base in reversed(node.bases):
        known = classes.get(getattr(base, "id", ""))
        if known is not None and known is not node:
            inherited, is_whole = _methods_of(known, {name: c for name, c in classes.items() if c is not node})
            methods, is_complete = methods | inherited, is_complete and is_whole
        elif getattr(base, "id", "") != "object":
            is_complete = False
    return methods | {item.name: item for item in node.body if isinstance(item, Function)}, is_complete


def _takes(function: Function, num_given: int) -> bool:
    """Return whether a function can be called with so many positional arguments; a decorated one may."""
    arguments = function.args
    if function.decorator_list:
        return True
    plain = len(arguments.posonlyargs) + len(arguments.args)
    least = plain - len(arguments.defaults)
    needs_names = any(default is None for default in arguments.kw_defaults)
    return least <= num_given and (arguments.vararg is not None or num_given <= plain) and not needs_names

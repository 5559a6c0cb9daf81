"""Regular expressions of the configuration, which are matched against a model's output."""

from __future__ import annotations

import re
import warnings
from typing import Any


def check_pattern(pattern: str) -> int:
    """Reject an invalid regular expression, and nested repetition such as "(a+)+", which may take exponential time.

    Nested repetition is recognised by syntax only, so some harmless patterns are rejected. Some slow patterns are
    accepted; the grader's time limit stops those.

    Returns:
        The number of groups in the pattern.

    Raises:
        ValueError: Contains the reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree: Any = re._parser.parse(pattern, re.DOTALL)  # type: ignore[attr-defined]
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r}: {error}") from error
    if _repeats_repetition(tree, inside=False):
        raise ValueError(f"{pattern!r} repeats a repetition, which may take exponential time")
    return int(tree.state.groups) - 1


def _repeats_repetition(node: Any, inside: bool) -> bool:
    if isinstance(node, (list, tuple)) or type(node).__name__ == "SubPattern":
        items = list(node)
        if items and str(items[0]) in ("MAX_REPEAT", "MIN_REPEAT") and len(items) == 2:
            _, most, body = items[1]
            repeats = most == re._constants.MAXREPEAT  # type: ignore[attr-defined]
            return (inside and repeats) or _repeats_repetition(body, inside or repeats)
        return any(_repeats_repetition(item, inside) for item in items)
    return False

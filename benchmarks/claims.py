"""What every benchmark ends with and begins with: a claim as a line of JSON, and the choice of its quick form."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable


class MissingEnvironment(RuntimeError):
    """A benchmark cannot run here; the text names what it needs."""


def report(claim: str, value: float, goal: float, at_least: bool = False) -> None:
    """Print a claim, its value, the goal and whether it is met.

    Args:
        claim: What was measured.
        value: The result.
        goal: The largest value that is good enough.
        at_least: The goal is the smallest one instead.
    """
    met = value >= goal if at_least else value <= goal
    print(json.dumps({"claim": claim, "value": round(value, 3), "goal": goal, "met": met}))


def start(main: Callable[[], None], quick: Callable[[], None]) -> None:
    """Run a benchmark, or with `--quick` the same code on sizes of seconds, whose figures mean nothing."""
    try:
        quick() if "--quick" in sys.argv[1:] else main()
    except MissingEnvironment as missing:
        sys.exit(str(missing))

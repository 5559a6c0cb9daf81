"""A measured claim as a line of JSON, the last thing that a benchmark prints."""

from __future__ import annotations

import json


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

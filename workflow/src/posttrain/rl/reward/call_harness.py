"""Runs in a sandbox beside a solution: evaluates expressions with it, and writes their values to standard output.

`posttrain.rl.reward.code` passes this file's text as the program. It knows no expected value, so a solution that writes
into the same channel can at most spoil its own answers.
"""

import json
import os
import sys


def plain(value):
    """Return a value in JSON types, with a letter before the items of each collection.

    Raises:
        TypeError: It is no plain value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # Also a subclass becomes a plain value.
        kinds = (bool, int, float, str)
        return value if value is None else next(kind(value) for kind in kinds if isinstance(value, kind))
    if isinstance(value, dict):
        return ["d", *([plain(key), plain(item)] for key, item in value.items())]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    for letter, kind in (("t", tuple), ("s", set | frozenset), ("l", list)):
        if isinstance(value, kind):
            return [letter, *map(plain, value)]
    raise TypeError(f"{type(value).__name__} is no plain value")


def take(step, namespace):
    """Take one step: a statement, an expression, or a call of a function or of a method of `Solution`."""
    kind, text, *arguments = step
    if kind == "exec":
        exec(text, namespace)
        return None
    if kind == "eval":
        return eval(text, namespace)
    function = namespace[text] if text in namespace else getattr(namespace["Solution"](), text)
    return function(*arguments[0])


def main():
    """Take all steps; write one line for each, with its value or its error."""
    steps = json.load(sys.stdin)
    # What the solution prints must not mix with the values.
    channel = os.dup(1)
    os.dup2(2, 1)
    with open("solution.py", encoding="utf-8") as file:
        text = file.read()
    namespace = {"__name__": "solution"}
    exec(compile(text, "solution.py", "exec"), namespace)
    # What the tests assign must not replace the solution's names.
    namespace = dict(namespace)
    for step in steps:
        try:
            line = json.dumps({"value": plain(take(step, namespace))})
        except (Exception, SystemExit) as error:
            line = json.dumps({"error": type(error).__name__})
        os.write(channel, line.encode() + b"\n")


main()

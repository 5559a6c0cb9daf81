"""What can go wrong, and how it is told.

Wrong input is a `Problem`: the key, its value, what is allowed and the remedy. Problems are collected and raised
once, so that a user mends them all in one go. `CheckpointError` is a checkpoint that is not what it should be.
Both are shown without a traceback (`posttrain.cli`), because the text alone says what to do. Failures of the
outside world (HTTP, disk, a process) are `RuntimeError`s; an impossible state is an `assert`.

Messages tell what others wrote: names of files and tensors, values, addresses. `printable` is what keeps that from
speaking to the user's terminal; all messages, the log and the pages go through it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# Control characters but tab and line break, halves of characters, and what makes text run the other way.
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
# User and password of an address.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?:@[^/\s@]+)*@")


def printable(text: str) -> str:
    """Return a text with control characters named, not shown, and without the user and password of addresses.

    Example:
        A file called "a", ESC, "[2J" is told as "a\\x1b[2J"; "http://user:word@host/x" as "http://***@host/x".
    """
    named = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _CREDENTIALS.sub("***@", named)


def one_line(name: object) -> str:
    """Return a name that others chose as it may stand in a list: a line break in it begins no line of its own."""
    return printable(str(name)).replace("\n", "\\n")


def reason_of(error: BaseException) -> str:
    """Return in one line why something cannot be read; torch's text on a pickle goes on with how to let it run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = next((line for line in lines if "GLOBAL" in line), lines[0])
    return "it holds more than tensors and plain values" if named.startswith("Weights only load failed") else named


@dataclass(frozen=True)
class Problem:
    """One wrong input.

    Args:
        key: Where the value comes from: a config key ("optimizer.lr"), a file, a tensor.
        value: What was found, as text.
        allowed: What would be accepted.
        remedy: What the user should do.
    """

    key: str
    value: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}\n      allowed: {self.allowed}\n      remedy:  {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """Return the problem as it stands in `plan.json`."""
        return asdict(self)


class ConfigError(ValueError):
    """The configuration is wrong; `problems` lists everything that is, not only the first.

    Args:
        problems: At least one.
        hint: Where to read more, at the end of the message.
    """

    def __init__(self, problems: Sequence[Problem], hint: str = ""):
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]
        super().__init__(printable("\n".join([*lines, hint] if hint else lines)))


class CheckpointError(ValueError):
    """A checkpoint, shard or receipt is not as expected.

    Args:
        text: Names file, tensor and both sides.
    """

    def __init__(self, text: str):
        super().__init__(printable(text))


def raise_if_any(problems: Sequence[Problem], hint: str = "") -> None:
    """Raise `ConfigError` when there is at least one problem."""
    if problems:
        raise ConfigError(problems, hint)

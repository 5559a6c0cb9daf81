"""What can go wrong, and how it is told.

Wrong input is a `Problem`: the key, its value, what is allowed and the remedy. Problems are collected and raised
once, so that a user mends them all in one go. `CheckpointError` is a checkpoint that is not what it should be.
Both are shown without a traceback (`posttrain.cli`), because the text alone says what to do. Failures of the
outside world (HTTP, disk, a process) are `RuntimeError`s; an impossible state is an `assert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


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
        super().__init__("\n".join([*lines, hint] if hint else lines))


class CheckpointError(ValueError):
    """A checkpoint, shard or receipt is not as expected; the text names file, tensor and both sides."""


def raise_if_any(problems: Sequence[Problem], hint: str = "") -> None:
    """Raise `ConfigError` when there is at least one problem."""
    if problems:
        raise ConfigError(problems, hint)

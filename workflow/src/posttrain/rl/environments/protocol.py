"""What an environment is: the counterpart of an agent, which answers its actions until the episode ends.

A user writes a class with the methods of `Environment`. posttrain makes one instance per trajectory, in a worker
process (`rl.environments.pool`), and never calls two of its methods at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# A chat message: "role" and "content", perhaps with "tool_calls".
Message = dict[str, Any]


class Environment(Protocol):
    """A user's environment.

    Args:
        seed: Everything random in an episode follows from it.

    Example:
        A game of guessing a number::

            class Guess:
                def __init__(self, seed):
                    self.number = random.Random(seed).randrange(10)

                async def reset(self, row):
                    return [{"role": "user", "content": "Guess my digit."}], None

                async def step(self, action):
                    self.last = action["content"].strip()
                    higher = "higher" if self.last < str(self.number) else "lower"
                    return [{"role": "user", "content": higher}], self.last == str(self.number)

                async def reward(self, trajectory):
                    return float(self.last == str(self.number))
    """

    def __init__(self, seed: int): ...

    async def reset(self, row: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Begin the episode.

        Args:
            row: The dataset's row: "messages" (its prompt), "label", and its other columns.

        Returns:
            The messages that the agent sees first, and JSON schemas of the functions that it may call, or None.
        """

    async def step(
        self, action: Message
    ) -> tuple[Sequence[Message], bool] | tuple[Sequence[Message], bool, float | None]:
        """Answer an action.

        Args:
            action: The agent's message, with "tool_calls" if it has called functions: `{"id", "type": "function",
                "function": {"name", "arguments": object}}` each; "arguments" is the text if it is not a JSON object.

        Returns:
            New messages for the agent, whether the episode has ended, and perhaps this turn's reward, which is added
            to the episode's.
        """

    async def reward(self, trajectory: Mapping[str, Any]) -> float | Mapping[str, float]:
        """Return the reward of the finished episode, or several numbers by name, of which "reward" is the reward.

        Args:
            trajectory: "messages" (all of the episode), "num_turns", and "end": why it ended, a value of `ENDS`.
        """

    async def close(self) -> None:
        """Release what the episode has opened. Optional; also called if the episode fails."""

    def perfect(self, row: Mapping[str, Any]) -> Sequence[Message | str]:
        """Return the messages of a perfect agent, or their texts. Optional; only asked before `reset`, by a check."""


# Why an episode ended: the environment said so, `environment.max_turns`, no tokens were left, or a response was cut.
ENDS = ("done", "turns", "tokens", "truncated")


@dataclass(frozen=True)
class Start:
    """What an environment answers to `reset`.

    Args:
        messages: What the agent sees first.
        tools: JSON schemas of functions, or None.
    """

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Observation:
    """What an environment answers to `step`.

    Args:
        messages: New messages for the agent; may be empty if the episode has ended.
        done: Whether it has ended.
        reward: Of this turn; None if it has none of its own.
    """

    messages: tuple[Message, ...]
    done: bool
    reward: float | None = None


@dataclass(frozen=True)
class EpisodeReward:
    """What an environment answers to `reward`.

    Args:
        reward: Finite.
        parts: Other numbers by name.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class EnvironmentFailure(Exception):
    """An environment failed; the trajectory has no reward and is counted.

    Args:
        kind: "error" (it raised or answered nonsense), "deadline", "crash" (its process or service ended).
        reason: One line.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(f"environment {kind}: {reason}")
        self.kind, self.reason = kind, reason


class OpenEnvironment(Protocol):
    """An environment of one trajectory, as the rollout sees it; each method raises `EnvironmentFailure`."""

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`."""

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """See `Environment`."""

    async def close(self) -> None:
        """End the environment; never raises."""


class Environments(Protocol):
    """Opens environments: worker processes (`rl.environments.pool`) or a service."""

    async def open(self, seed: int) -> OpenEnvironment:
        """Return a new environment.

        Raises:
            EnvironmentFailure: None could be made.
        """

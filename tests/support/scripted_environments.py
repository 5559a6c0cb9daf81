"""Environments in the test's own process, which do what a script says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start

# What a step answers, from the number of the turn.
Answer = Callable[[int, Message], Observation]


def more(number: int, action: Message) -> Observation:
    """Go on after the first two turns."""
    return Observation(({"role": "user", "content": "1"},), done=number >= 2)


class ScriptedEnvironments:
    """Opens environments that ask the row's prompt and answer as a function says.

    Args:
        answer: Answers actions.
        tools: Schemas of functions.
        reward: Of every episode; an `EnvironmentFailure` is raised.
        num_failing: The first so many environments fail to begin.
        failing: Prompt whose environments never begin.
    """

    def __init__(
        self,
        answer: Answer = more,
        tools: list[dict[str, Any]] | None = None,
        reward: float | EnvironmentFailure = 1.0,
        num_failing: int = 0,
        failing: str = "",
    ):
        self.failing = failing
        self.answer, self.tools, self.given, self.num_failing = answer, tools, reward, num_failing
        self.opened: list[ScriptedEnvironment] = []

    async def open(self, seed: int) -> ScriptedEnvironment:
        """See `Environments`."""
        self.opened.append(ScriptedEnvironment(self, seed))
        return self.opened[-1]

    @property
    def num_open(self) -> int:
        """Environments that were not closed."""
        return sum(not one.is_closed for one in self.opened)


class ScriptedEnvironment:
    """One of them; remembers what it was told."""

    def __init__(self, family: ScriptedEnvironments, seed: int):
        self.family, self.seed = family, seed
        self.actions: list[Message] = []
        self.trajectory: Mapping[str, Any] = {}
        self.is_closed = False

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`."""
        if row["messages"][0]["content"] == self.family.failing:
            raise EnvironmentFailure("error", "it never begins")
        if self.family.num_failing:
            self.family.num_failing -= 1
            raise EnvironmentFailure("crash", "it does not begin")
        return Start(tuple(row["messages"]), self.family.tools)

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""
        self.actions.append(action)
        return self.family.answer(len(self.actions) - 1, action)

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """See `Environment`."""
        self.trajectory = trajectory
        if isinstance(self.family.given, EnvironmentFailure):
            raise self.family.given
        return EpisodeReward(self.family.given, {"turns": float(trajectory["num_turns"])})

    async def close(self) -> None:
        """See `Environment`."""
        self.is_closed = True

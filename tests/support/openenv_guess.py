"""An environment on OpenEnv's own base classes: guess a digit within four steps. It runs in OpenEnv's environment."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """A guess."""

    digit: int


class Hint(Observation):
    """How the number compares with the guess."""

    hint: str


class GuessEnvironment(Environment):
    """The number follows from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state, self._number = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._state, self._number = State(), random.Random(seed).randrange(10)
        return Hint(hint=f"guess from 0 to {kwargs.get('highest', 9)}", done=False)

    def step(self, action: Guess) -> Hint:
        if action.digit == 66:
            raise RuntimeError("a defect")
        self._state.step_count += 1
        hint = "right" if action.digit == self._number else "higher" if action.digit < self._number else "lower"
        done = hint == "right" or self._state.step_count == 4
        return Hint(hint=hint, done=done, reward=float(hint == "right") if done else None)

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=4)

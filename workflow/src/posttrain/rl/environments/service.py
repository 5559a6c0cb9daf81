"""Environments of a service with the schema of docs/environments.md, such as `rl.environments.serve`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from posttrain.rl.environments.answers import observation_of, reward_of, start_of
from posttrain.rl.environments.http_calls import HttpCalls
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start


class ServiceEnvironment:
    """An environment of a service; see `OpenEnvironment`.

    Args:
        url: Its address.
        deadline_seconds: Time limit of a call.
        seed: The environment's.
    """

    def __init__(self, url: str, deadline_seconds: float, seed: int):
        self._calls, self._seed = HttpCalls(url, deadline_seconds), seed
        self._session = ""

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`."""
        answer = await self._calls.post("/reset", {"seed": self._seed, "row": row})
        start = start_of(answer)
        session = answer.get("session")
        if not isinstance(session, str) or not session:
            raise EnvironmentFailure("error", f"'session' is {session!r:.80}, expected a text")
        self._session = session
        return start

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""
        return observation_of(await self._calls.post("/step", {"session": self._session, "action": action}))

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """See `Environment`."""
        return reward_of(await self._calls.post("/reward", {"session": self._session, "trajectory": trajectory}))

    async def close(self) -> None:
        """See `OpenEnvironment`."""
        try:
            if self._session:
                with contextlib.suppress(EnvironmentFailure):
                    await self._calls.post("/close", {"session": self._session})
        finally:
            self._session = ""
            await self._calls.close()

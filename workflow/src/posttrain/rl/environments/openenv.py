"""Environments of an OpenEnv server (0.10.0), over its WebSocket.

The agent acts by calling the function `act`, whose parameters are the server's schema of actions; it reads observations
as JSON. A step's reward is the turn's. The episode ends when the server says so, or with a response without a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from posttrain.errors import one_line
from posttrain.http_answers import PLAIN, read_bounded
from posttrain.rl.environments.answers import observation_of, start_of
from posttrain.rl.environments.frames import MAX_ANSWER_BYTES
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start
from posttrain.store import parse_json

ACT = "act"
# What the agent did wrong; every other error is the server's.
AGENTS_ERRORS = ("VALIDATION_ERROR", "INVALID_JSON")


class OpenEnvEnvironment:
    """A session, which is a connection; see `OpenEnvironment`.

    Args:
        url: The address of a server that allows as many sessions as episodes run at once, "http://host:port".
        deadline_seconds: Time limit of a call.
        seed: The environment's.
    """

    def __init__(self, url: str, deadline_seconds: float, seed: int):
        self._url, self._deadline, self._seed = url.rstrip("/"), deadline_seconds, seed
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        # The server has said that the episode has ended, and has given a reward.
        self._is_done = self._is_rewarded = False

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`; the row's columns are the arguments of the server's `reset`."""
        async with self._within("reset"):
            tool = await self._connect()
        columns = {name: value for name, value in row.items() if name not in ("messages", "label")}
        answer = await self._ask("reset", {**columns, "seed": self._seed})
        if "failure" in answer:
            raise EnvironmentFailure("error", answer["failure"])
        return start_of({"messages": _begun(row["messages"], answer["text"]), "tools": [tool]})

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""
        calls = action.get("tool_calls") or []
        messages: list[Message] = []
        rewards: list[Any] = []
        done = not calls
        for call in calls:
            answer = {"failure": "the episode has ended"} if done else await self._act(call["function"])
            text = answer.get("text", f"error: {answer.get('failure')}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            self._is_done = self._is_done or answer.get("done") is True
            done = done or self._is_done
            rewards += [] if answer.get("reward") is None else [answer["reward"]]
        self._is_rewarded = self._is_rewarded or bool(rewards)
        return observation_of({"messages": messages, "done": done, "reward": _sum(rewards)})

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """Return 0: rewards are those of turns.

        Raises:
            EnvironmentFailure: The server has ended the episode and has never given a reward.
        """
        if self._is_done and not self._is_rewarded:
            raise EnvironmentFailure("error", "the server ended the episode and gave no reward in any step")
        return EpisodeReward(0.0)

    async def close(self) -> None:
        """See `OpenEnvironment`."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(self._deadline):
                if self._socket is not None:
                    await self._socket.send_json({"type": "close"})
                    await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _connect(self) -> dict[str, Any]:
        """Open the connection; return the function by which the agent acts."""
        timeout = aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(timeout=timeout, headers=PLAIN)
        async with self._http.get(f"{self._url}/schema", allow_redirects=False) as response:
            if response.status != 200:
                raise EnvironmentFailure("error", f"/schema: HTTP {response.status}")
            schemas = parse_json(await read_bounded(response.content.iter_any(), MAX_ANSWER_BYTES))
        schema = schemas.get("action") if isinstance(schemas, dict) else None
        if not isinstance(schema, dict):
            raise EnvironmentFailure("error", "/schema has no schema of actions")
        properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        described = ("title", "description", "properties")
        parameters = {name: value for name, value in schema.items() if name not in described}
        function = {"name": ACT, "description": schema.get("description", ""), "parameters": parameters}
        parameters["properties"] = properties
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_ANSWER_BYTES)
        return {"type": "function", "function": function}

    async def _act(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action; return what it was answered with, or a "failure" that is the agent's."""
        if function["name"] != ACT:
            return {"failure": f"there is no function {function['name']!r:.80}; call {ACT}"}
        if not isinstance(function["arguments"], dict):
            return {"failure": "the arguments are not a JSON object"}
        return await self._ask("step", function["arguments"])

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return "text", "done" and "reward", or a "failure" that is the agent's."""
        assert self._socket is not None
        async with self._within(kind):
            await self._socket.send_str(json.dumps({"type": kind, "data": data}, allow_nan=False))
            message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFailure("crash", f"the server closed the connection in {kind} ({message.type.name})")
        try:
            answer = parse_json(message.data)
            given = answer["data"]
            if answer["type"] == "observation":
                text = json.dumps(given["observation"], ensure_ascii=False)
                return {"text": text, "done": given.get("done"), "reward": given.get("reward")}
            reason, code = one_line(json.dumps(given.get("errors") or given.get("message")))[:1000], given.get("code")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EnvironmentFailure("error", f"the answer to {kind} is not an observation: {error}") from error
        if code in AGENTS_ERRORS:
            return {"failure": reason}
        raise EnvironmentFailure("error", f"{kind}: {code}: {reason}")

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """Limit the time of a call, and name what went wrong."""
        try:
            async with asyncio.timeout(self._deadline):
                yield
        except TimeoutError as error:
            raise EnvironmentFailure("deadline", f"{what} was not answered within {self._deadline:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailure("crash", f"{what}: {type(error).__name__}: {one_line(error)}") from error
        except (ValueError, TypeError) as error:
            raise EnvironmentFailure("error", f"{what}: {one_line(error)}") from error


def _begun(messages: Any, observation: str) -> list[Message]:
    """Return the row's messages with the first observation in the user's last one."""
    given: list[Message] = [dict(message) for message in messages]
    if given and given[-1]["role"] == "user":
        return [*given[:-1], {**given[-1], "content": f"{given[-1]['content']}\n\n{observation}"}]
    return [*given, {"role": "user", "content": observation}]


def _sum(rewards: list[Any]) -> Any:
    """Return the sum of numbers, None for none; what is no number is returned, to be rejected."""
    wrong = [reward for reward in rewards if not isinstance(reward, int | float)]
    return wrong[0] if wrong else sum(rewards) if rewards else None

"""Environments of a resources server of NeMo Gym (0.4.0), over its HTTP API.

Rows are NeMo Gym's own: `responses_create_params` has messages and tools, and the server reads the other columns. A
call of a tool is a request to the path of its name. A response without calls ends the episode, and `/verify` grades it.

A server finds its session by a cookie and silently begins a new one if the cookie or the session is lost, which
`/verify` then grades with 0. So this client checks that the session stays the same, and that the server does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from posttrain.rl.environments.answers import reward_of, start_of
from posttrain.rl.environments.http_calls import HttpCalls
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start
from posttrain.store import parse_json

PARAMETERS = "responses_create_params"
# What the agent did wrong: there is no such tool, or its arguments are others.
AGENTS_ERRORS = (404, 422)


class NemoGymEnvironment:
    """A session; see `OpenEnvironment`.

    Args:
        url: The server's address.
        deadline_seconds: Time limit of a call.
        seed: Not used: servers take none.
    """

    def __init__(self, url: str, deadline_seconds: float, seed: int):
        self._calls = HttpCalls(url, deadline_seconds)
        self._alive = _IdleConnection(url, deadline_seconds)
        self._row: dict[str, Any] = {}
        self._session = ""
        self._tools: set[str] = set()
        self._num_given = 0

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`."""
        given = row.get(PARAMETERS)
        if not isinstance(given, Mapping):
            raise EnvironmentFailure("error", f"the row has no {PARAMETERS}, so it is not a row of NeMo Gym")
        self._row = {name: value for name, value in row.items() if name != "messages"}
        start = start_of({"messages": list(_messages_of(given)), "tools": _tools_of(given)})
        self._tools = {tool["function"]["name"] for tool in start.tools or ()}
        self._num_given = len(start.messages)
        await self._alive.open()
        await self._calls.post("/seed_session", self._row)
        self._session = _session_of(self._calls.cookies)
        if not self._session:
            raise EnvironmentFailure("error", "/seed_session set no cookie with a session")
        return start

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""
        calls = action.get("tool_calls") or []
        results = [await self._result(call["function"]) for call in calls]
        messages = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return Observation(tuple(messages), done=not calls)

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """See `Environment`."""
        response = _response_of(trajectory["messages"][self._num_given :])
        answer = await self._calls.post("/verify", {**self._row, "response": response})
        self._check_session()
        if not isinstance(answer, dict):
            raise EnvironmentFailure("error", "/verify was answered with no object")
        more = answer.keys() - self._row.keys() - {"reward", "response"}
        parts = {name: answer[name] for name in sorted(more) if isinstance(answer[name], int | float)}
        return reward_of({"reward": answer.get("reward"), "parts": parts})

    async def close(self) -> None:
        """See `OpenEnvironment`; servers end no session."""
        self._alive.close()
        await self._calls.close()

    async def _result(self, function: Mapping[str, Any]) -> str:
        """Return what the agent reads after a call. Only the row's tools are called: a server has other paths, too."""
        name, arguments = function["name"], function["arguments"]
        if name not in self._tools:
            return f"error: there is no function {name!r:.80}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        _, content = await self._calls.ask(f"/{name}", arguments, (200, *AGENTS_ERRORS))
        self._check_session()
        return content.decode(errors="replace")

    def _check_session(self) -> None:
        """Raise `EnvironmentFailure` if the server has begun another session, or is another process."""
        if _session_of(self._calls.cookies) != self._session:
            raise EnvironmentFailure("crash", "the server lost the session and began another one")
        if not self._alive.is_open:
            raise EnvironmentFailure("crash", "the server has closed its connections; its sessions may be lost")


class _IdleConnection:
    """A connection on which nothing is sent. The server's end of it ends with the server, and with it the sessions."""

    def __init__(self, url: str, deadline_seconds: float):
        parts = urlsplit(url)
        self._place = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._deadline = deadline_seconds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_open(self) -> bool:
        return self._streams is not None and not self._streams[0].at_eof() and not self._streams[0].exception()

    async def open(self) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                self._streams = await asyncio.open_connection(*self._place)
        except (OSError, TimeoutError) as error:
            raise EnvironmentFailure(
                "crash", f"the server cannot be reached: {error or type(error).__name__}"
            ) from error

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()


def _session_of(cookies: Mapping[str, str]) -> str:
    """Return the session's number, which a cookie holds before its date and signature; "" if there is none."""
    for value in cookies.values():
        with contextlib.suppress(ValueError):
            content = parse_json(base64.b64decode(value.partition(".")[0]))
            if isinstance(content, dict) and isinstance(content.get("session_id"), str):
                return content["session_id"]
    return ""


def _messages_of(given: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of a request to OpenAI's Responses API as those of chats."""
    if isinstance(given.get("instructions"), str):
        yield {"role": "system", "content": given["instructions"]}
    items = given.get("input")
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items or ():
        content = item.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(part["text"] for part in content)
        role = item.get("role")
        if role is None or not isinstance(content, str):
            raise EnvironmentFailure("error", f"an item of {PARAMETERS}.input is not a text message")
        yield {"role": "system" if role == "developer" else role, "content": content}


def _tools_of(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the functions of a request to the Responses API as those of chats."""
    tools = given.get("tools") or []
    names = ("name", "description", "parameters")
    functions = [{name: tool[name] for name in names if tool.get(name) is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions] or None


def _response_of(messages: Sequence[Message]) -> dict[str, Any]:
    """Return what an agent has said and read as an answer of the Responses API."""
    output: list[dict[str, Any]] = []
    numbers = itertools.count()
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool":
            call_id = names.get(message.get("tool_call_id", ""), "")
            output.append({"type": "function_call_output", "call_id": call_id, "output": message["content"]})
        elif message["role"] == "assistant":
            if message.get("content") or not message.get("tool_calls"):
                output.append(_said(next(numbers), message.get("content") or ""))
            # Identifiers of calls are unique in a message; here they have to be in the episode.
            for call in message.get("tool_calls") or ():
                names[call["id"]] = call_id = f"call_{next(numbers)}"
                output.append(_called(call_id, call["function"]))
    return {
        "id": "response",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _said(number: int, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": f"message_{number}",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _called(call_id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "type": "function_call",
        "id": call_id,
        "call_id": call_id,
        "name": function["name"],
        "arguments": text,
        "status": "completed",
    }

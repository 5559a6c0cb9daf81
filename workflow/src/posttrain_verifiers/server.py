"""Answers posttrain's four requests, with an endpoint on loopback that stands for the model.

Whoever reaches the port can play the environment: there is no password.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.env import Env

from posttrain_verifiers.episode import Episode, EpisodeFailure
from posttrain_verifiers.taskset import task_of

MAX_REQUEST_BYTES = 64 << 20
# Names a variable that is not set: the endpoint asks for no key.
NO_KEY = "POSTTRAIN_VERIFIERS_NO_KEY"


class Session:
    """An episode that a client plays.

    Args:
        episode: It.
    """

    def __init__(self, episode: Episode):
        self.episode = episode
        # A client that has lost its connection may call again before the first call has ended.
        self.turn = asyncio.Lock()
        self.last_call = time.monotonic()


class TasksetServer:
    """Sessions of an environment.

    Args:
        environment: Of verifiers.
        idle_seconds: A session without a call for so long is closed: its client is gone.
    """

    def __init__(self, environment: Env, idle_seconds: float):
        self._environment, self._idle = environment, idle_seconds
        self._sessions: dict[str, Session] = {}
        self._context: ModelContext | None = None

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for name in ("reset", "step", "reward", "close"):
            app.router.add_post(f"/{name}", _answering(getattr(self, f"_{name}")))
        app.cleanup_ctx.append(self._serve_environment)
        return app

    async def _serve_environment(self, app: web.Application) -> AsyncIterator[None]:
        model = web.Application(client_max_size=MAX_REQUEST_BYTES)
        model.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(model, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._context = ModelContext("policy", EvalClientConfig(base_url=address, api_key_var=NO_KEY))
        async with self._environment.serving():
            closing = asyncio.create_task(self._close_idle())
            yield
            closing.cancel()
            await asyncio.gather(*(session.episode.close() for session in self._sessions.values()))
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a request to the model; the header says which rollout it comes from."""
        trace = request.headers.get(SESSION_ID_HEADER, "")
        for session in self._sessions.values():
            if session.episode.trace is not None and session.episode.trace.id == trace:
                try:
                    return web.json_response(await session.episode.complete(await request.json()))
                except EpisodeFailure as failure:
                    return web.json_response({"error": {"message": failure.reason}}, status=400)
        return web.json_response({"error": {"message": "no such episode"}}, status=404)

    async def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        task = task_of(self._environment, body["row"])
        assert self._context is not None
        name, session = secrets.token_hex(16), Session(Episode(self._environment, task, self._context))
        self._sessions[name] = session
        try:
            async with session.turn:
                observation = await session.episode.observe()
            if observation is None:
                raise EpisodeFailure("error", "the episode ended before the agent was asked")
        except BaseException:
            await self._close({"session": name})
            raise
        return {"session": name, "messages": observation.messages, "tools": observation.tools or None}

    async def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._session(body)
        async with session.turn:
            session.episode.act(body["action"])
            observation = await session.episode.observe()
            session.last_call = time.monotonic()
        messages = observation.messages if observation else []
        return {"messages": messages, "done": observation is None, "reward": None}

    async def _reward(self, body: dict[str, Any]) -> dict[str, Any]:
        session, trajectory = self._session(body), body["trajectory"]
        is_cut = trajectory["end"] == "truncated"
        async with session.turn:
            return await session.episode.finish(trajectory["end"], trajectory["messages"][-1] if is_cut else None)

    async def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        if session := self._sessions.pop(str(body["session"]), None):
            await session.episode.close()
        return {}

    def _session(self, body: dict[str, Any]) -> Session:
        session = self._sessions.get(str(body["session"]))
        if session is None:
            raise EpisodeFailure("crash", "the service has no such session; it was restarted, or has closed it")
        session.last_call = time.monotonic()
        return session

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle / 10)
            latest = time.monotonic() - self._idle
            over = [name for name, s in self._sessions.items() if s.last_call < latest and not s.turn.locked()]
            for name in over:
                await self._close({"session": name})


def _answering(
    answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers failures with {"kind", "reason"}."""

    async def handle(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            if not isinstance(body, dict):
                raise TypeError("expected an object")
            return web.json_response(await answer(body))
        except EpisodeFailure as failure:
            return web.json_response({"kind": failure.kind, "reason": failure.reason}, status=500)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"the request cannot be read: {type(error).__name__}: {error}"
            return web.json_response({"kind": "error", "reason": reason}, status=400)

    return handle

"""Serves environments over HTTP: `python -m posttrain.rl.environments.serve path.py:Class --port 8400`.

The schema is that of docs/environments.md. Whoever reaches the port can run the environment: there is no password.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from posttrain.config.environment_rules import least_deadline
from posttrain.config.own_environment import BUILT_IN, inspect_environment, is_own
from posttrain.config.sandbox import SandboxSettings
from posttrain.errors import ConfigError
from posttrain.rl.environments.pool import (
    SANDBOXED,
    EnvironmentPool,
    PooledEnvironment,
    built_in_source,
    own_source,
)
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.store import parse_json

MAX_REQUEST_BYTES = 64 << 20


class Session:
    """An environment that a client has reset.

    Args:
        environment: The open environment.
    """

    def __init__(self, environment: PooledEnvironment):
        self.environment = environment
        # A client that has lost its connection may call again before the first call has ended.
        self.turn = asyncio.Lock()
        self.last_call = time.monotonic()


class EnvironmentServer:
    """Sessions of a pool's environments.

    Args:
        pool: Opens them.
        idle_seconds: A session without a call for so long is closed: its client is gone.
    """

    def __init__(self, pool: EnvironmentPool, idle_seconds: float):
        self._pool, self._idle = pool, idle_seconds
        self._sessions: dict[str, Session] = {}

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for name in ("reset", "step", "reward", "close"):
            app.router.add_post(f"/{name}", _answering(getattr(self, f"_{name}")))
        app.cleanup_ctx.append(self._run_pool)
        return app

    async def _run_pool(self, app: web.Application) -> AsyncIterator[None]:
        with self._pool:
            closing = asyncio.create_task(self._close_idle())
            yield
            closing.cancel()

    async def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        environment = await self._pool.open(int(body["seed"]))
        try:
            start = await environment.reset(body["row"])
        except BaseException:
            await environment.close()
            raise
        name = secrets.token_hex(16)
        self._sessions[name] = Session(environment)
        return {"session": name, "messages": start.messages, "tools": start.tools}

    async def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session(body) as environment:
            return asdict(await environment.step(body["action"]))

    async def _reward(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session(body) as environment:
            reward = await environment.reward(body["trajectory"])
            return {"reward": reward.reward, "parts": dict(reward.parts)}

    async def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        if session := self._sessions.pop(str(body["session"]), None):
            await session.environment.close()
        return {}

    @contextlib.asynccontextmanager
    async def _session(self, body: dict[str, Any]) -> AsyncIterator[PooledEnvironment]:
        session = self._sessions.get(str(body["session"]))
        if session is None:
            raise EnvironmentFailure("crash", "the service has no such session: it was restarted or closed the session")
        async with session.turn:
            session.last_call = time.monotonic()
            yield session.environment
            session.last_call = time.monotonic()

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
            body = parse_json(await request.read())
            if not isinstance(body, dict):
                raise TypeError("expected an object")
            return web.json_response(await answer(body))
        except EnvironmentFailure as failure:
            return web.json_response({"kind": failure.kind, "reason": failure.reason}, status=500)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"the request cannot be read: {type(error).__name__}: {error}"
            return web.json_response({"kind": "error", "reason": reason}, status=400)

    return handle


def main(words: list[str]) -> None:
    """Serve an environment until the process is ended."""
    parser = argparse.ArgumentParser(prog="posttrain.rl.environments.serve", description="Serve an environment.")
    parser.add_argument("environment", help=f"path.py:Class, or one of {', '.join(BUILT_IN)}")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses of this machine"
    )
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--num-workers", type=int, default=2, help="processes")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="memory limit of each")
    parser.add_argument("--deadline-seconds", type=float, default=60.0, help="time limit of a call")
    parser.add_argument(
        "--idle-seconds", type=float, default=3600.0, help="close a session that had no call for so long"
    )
    given = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if not is_own(given.environment) and given.environment not in BUILT_IN:
        parser.error(f"{given.environment!r} is neither path.py:Class nor one of {', '.join(BUILT_IN)}")
    least = least_deadline(SandboxSettings().seconds) if given.environment in SANDBOXED else 0.0
    if given.deadline_seconds < least:
        parser.error(f"--deadline-seconds {given.deadline_seconds:g}: programs of {given.environment} need {least:g}")
    try:
        if is_own(given.environment):
            source = own_source(inspect_environment(given.environment))
        else:
            source = built_in_source(given.environment, given.num_workers)
    except ConfigError as error:
        sys.exit(str(error))
    pool = EnvironmentPool(source, given.deadline_seconds, given.num_workers, int(given.memory_gib * 2**30))
    app = EnvironmentServer(pool, given.idle_seconds).app()
    web.run_app(app, host=given.host, port=given.port, print=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])

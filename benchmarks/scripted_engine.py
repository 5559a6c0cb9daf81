"""An engine with SGLang's API that samples nothing: a token takes a fixed time, however many requests run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

SECRET = "benchmark"
# A token of the small vocabulary that is no control token.
TOKEN = 10


def length_of(seed: int, median: int, most_medians: int) -> int:
    """Return the length of a response: log-normal with sigma 1, at most `most_medians` medians."""
    return max(1, min(round(median * random.Random(seed).lognormvariate(0, 1)), median * most_medians))


class ScriptedEngine:
    """The state of the engine.

    Args:
        token_seconds: Time of a token.
        median: Median length of a response in tokens.
        most_medians: Longest response in medians.
    """

    def __init__(self, token_seconds: float, median: int, most_medians: int):
        self._token_seconds, self._median, self._most_medians = token_seconds, median, most_medians
        self._version: str | None = None
        self._paused, self._runs = asyncio.Event(), asyncio.Event()
        self._runs.set()

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes."""
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/update_weights_from_tensor": self.update,
        }
        empty = ("/begin_weight_update", "/end_weight_update", "/flush_cache", "/abort_request")
        posts = [web.post(path, self._handler(call)) for path, call in calls.items()]
        posts += [web.post(path, self._handler(self.nothing)) for path in empty]
        return [*posts, *(web.get(path, self._handler(self.nothing)) for path in ("/health", "/get_model_info"))]

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the time of the longest response of the batch, and answer all at once."""
        asked = [(one["sampling_seed"], one["max_new_tokens"]) for one in body["sampling_params"]]
        lengths = [min(most, length_of(seed, self._median, self._most_medians)) for seed, most in asked]
        spans = await self._decode(max(lengths))
        return [_answer(length, spans) for length in lengths]

    async def _decode(self, length: int) -> list[tuple[str | None, int]]:
        """Return (version, end) of consecutive tokens; stands still during a pause."""
        spans: list[tuple[str | None, int]] = []
        made = 0.0
        while made < length:
            await self._runs.wait()
            started, version = time.perf_counter(), self._version
            try:
                await asyncio.wait_for(self._paused.wait(), (length - made) * self._token_seconds)
                made += (time.perf_counter() - started) / self._token_seconds
            except TimeoutError:
                made = length
            if spans and spans[-1][0] == version:
                spans.pop()
            spans.append((version, int(min(made, length))))
        return spans

    async def pause(self, body: dict[str, Any]) -> dict[str, Any]:
        """Stand still between two tokens."""
        self._runs.clear()
        self._paused.set()
        return {"status": "ok"}

    async def go_on(self, body: dict[str, Any]) -> dict[str, Any]:
        """Decode again."""
        self._paused.clear()
        self._runs.set()
        return {"status": "ok"}

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take the version of new weights."""
        self._version = body.get("weight_version") or self._version
        return {"success": True}

    async def nothing(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer that all is well."""
        return {"success": True, "weight_version": self._version}

    def _handler(self, call: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(await call(await request.json() if request.can_read_body else {}))

        return handle


def _answer(length: int, spans: list[tuple[str | None, int]]) -> dict[str, Any]:
    versions, start = [], 0
    for version, until in spans:
        if (end := min(until, length)) > start:
            versions.append({"version": version, "start": start, "end": end})
            start = end
    return {
        "output_ids": [TOKEN] * length,
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, TOKEN, None]] * length,
            "weight_version": versions[-1]["version"],
            "weight_versions": versions,
        },
    }


def serve(port: int, token_seconds: float, median: int, most_medians: int) -> None:
    """Serve on a port of this machine until the process is ended."""

    async def make() -> web.Application:
        application = web.Application(client_max_size=1 << 30)
        application.add_routes(ScriptedEngine(token_seconds, median, most_medians).routes())
        return application

    web.run_app(make(), host="127.0.0.1", port=port, print=None, access_log=None)

"""An engine with SGLang's API that samples nothing: a token takes a fixed time, however many requests run."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SECRET = "benchmark"
# A token of the small vocabulary that is no control token.
TOKEN = 10


def length_of(seed: int, median: int, most_medians: int) -> int:
    """Return the length of a response: log-normal with sigma 1, at most `most_medians` medians."""
    return max(1, min(round(median * random.Random(seed).lognormvariate(0, 1)), median * most_medians))


@dataclass(eq=False)
class Running:
    """A request that is answered.

    Args:
        stopped: Set when decoding has to stand still.
        is_aborted: It ends with the tokens that it has.
    """

    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    is_aborted: bool = False


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
        self._runs = asyncio.Event()
        self._runs.set()
        self._running: set[Running] = set()
        # Remaining lengths of aborted responses, keyed by prompt and generated tokens.
        self._rests: dict[tuple[int, ...], list[int]] = {}
        self._lengths: list[int] = []  # of all responses that were begun

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes."""
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/abort_request": self.abort,
            "/update_weights_from_tensor": self.update,
        }
        empty = ("/begin_weight_update", "/end_weight_update", "/flush_cache")
        posts = [web.post(path, self._handler(call)) for path, call in calls.items()]
        posts += [web.post(path, self._handler(self.nothing)) for path in empty]
        gets = [web.get(path, self._handler(self.nothing)) for path in ("/health", "/get_model_info")]
        return [*posts, *gets, web.get("/lengths", self._handler(self.lengths))]

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the time of the longest response of the batch, and answer all at once."""
        asked = zip(map(tuple, body["input_ids"]), body["sampling_params"], strict=True)
        lengths = [self._length_of(prompt, wanted) for prompt, wanted in asked]
        spans = await self._decode(max(lengths))
        made = spans[-1][1] if spans else 0
        for prompt, length in zip(map(tuple, body["input_ids"]), lengths, strict=True):
            if made < length:
                self._rests.setdefault((*prompt, *[TOKEN] * made), []).append(length - made)
        return [_answer(length, spans, self._version) for length in lengths]

    def _length_of(self, prompt: tuple[int, ...], wanted: dict[str, Any]) -> int:
        """Return the length of a response: the remaining tokens if it was aborted before, else a new length."""
        if rests := self._rests.get(prompt):
            return rests.pop()
        drawn = min(wanted["max_new_tokens"], length_of(wanted["sampling_seed"], self._median, self._most_medians))
        self._lengths.append(drawn)
        return drawn

    async def _decode(self, length: int) -> list[tuple[str | None, int]]:
        """Return (version, end) of consecutive tokens; stands still during a pause, and ends when aborted."""
        spans: list[tuple[str | None, int]] = []
        made = 0.0
        self._running.add(running := Running())
        while made < length and not running.is_aborted:
            await self._runs.wait()
            started, version = time.perf_counter(), self._version
            running.stopped.clear()
            try:
                await asyncio.wait_for(running.stopped.wait(), (length - made) * self._token_seconds)
                made += (time.perf_counter() - started) / self._token_seconds
            except TimeoutError:
                made = length
            if spans and spans[-1][0] == version:
                spans.pop()
            spans.append((version, int(min(made, length))))
        self._running.remove(running)
        return spans

    async def pause(self, body: dict[str, Any]) -> dict[str, Any]:
        """Stand still between two tokens."""
        self._runs.clear()
        for running in self._running:
            running.stopped.set()
        return {"status": "ok"}

    async def abort(self, body: dict[str, Any]) -> dict[str, Any]:
        """End all requests with the tokens that they have."""
        for running in self._running:
            running.is_aborted = True
            running.stopped.set()
        return {"status": "ok"}

    async def go_on(self, body: dict[str, Any]) -> dict[str, Any]:
        """Decode again."""
        self._runs.set()
        return {"status": "ok"}

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take the version of new weights."""
        self._version = body.get("weight_version") or self._version
        return {"success": True}

    async def lengths(self, body: dict[str, Any]) -> list[int]:
        """Return the length of each response that was begun."""
        return self._lengths

    async def nothing(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer that all is well."""
        return {"success": True, "weight_version": self._version}

    def _handler(self, call: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(await call(await request.json() if request.can_read_body else {}))

        return handle


def _answer(length: int, spans: list[tuple[str | None, int]], newest: str | None) -> dict[str, Any]:
    versions, start = [], 0
    is_complete = bool(spans) and spans[-1][1] >= length
    for version, until in spans:
        if (end := min(until, length)) > start:
            versions.append({"version": version, "start": start, "end": end})
            start = end
    return {
        "output_ids": [TOKEN] * start,
        "meta_info": {
            "finish_reason": {"type": "stop" if is_complete else "abort"},
            "output_token_logprobs": [[-1.0, TOKEN, None]] * start,
            "weight_version": versions[-1]["version"] if versions else newest,
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


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""A server on loopback that grades and judges, with faults on request.

    with RewardServer(faults=[status(503), cut]) as server:
        ServiceGrader("reward.services.far", Service(url=server.url)).grade_all(...)

As a program (`python -m tests.support.reward_server NUMBER`) it tells its port, answers so many requests and dies in
the middle of the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

# What happens to one request; without a response of its own the request is answered as ever.
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def status(code: int, **headers: str) -> Fault:
    """Answer with a status, the headers' names with _ for -; the text is all that was shown."""

    async def fault(request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, headers=named, text=f"you are {request.headers.get('Authorization')}")

    return fault


def says(text: str) -> Fault:
    """Answer with a text, whatever was asked."""

    async def fault(request: web.Request) -> web.Response:
        return web.Response(text=text)

    return fault


def slow(seconds: float) -> Fault:
    """Answer later."""

    async def fault(request: web.Request) -> None:
        await asyncio.sleep(seconds)

    return fault


def backwards(count: int) -> list[Fault]:
    """Answer so many requests, which must be under way together, in the reverse of the order in which they come."""
    answered = [asyncio.Event() for _ in range(count)]

    def answer_after(later: asyncio.Event | None, own: asyncio.Event) -> Fault:
        async def fault(request: web.Request) -> None:
            if later:
                await later.wait()
            own.set()

        return fault

    return [answer_after(later, own) for own, later in zip(answered, [*answered[1:], None], strict=True)]


async def cut(request: web.Request) -> None:
    """Close the connection without a word."""
    assert request.transport
    request.transport.abort()


async def trickle(request: web.Request) -> web.StreamResponse:
    """Send a byte from time to time, for ever."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.1)


async def nonsense(request: web.Request) -> None:
    """Answer with no HTTP, but with all that was shown."""
    assert request.transport
    request.transport.write(f"you are {request.headers.get('Authorization')}\r\n\r\n".encode())  # type: ignore[attr-defined]
    request.transport.close()


class RewardServer:
    """The server; a context manager.

    Args:
        faults: Of the first requests, in the order in which they come.
        always: Of all others.
        verdict: What a judge says to a question.

    Attributes:
        url: Of the service; a judge's is `judge_url`.
        asked: Body of each request.
        headers: Of each request.
        most_at_once: Requests that were under way at a time.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        always: Fault | None = None,
        verdict: Callable[[str], str] = lambda question: "Verdict: yes",
    ):
        self._faults, self._always, self._verdict = list(faults), always, verdict
        self._loop, self._started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = self.judge_url = ""
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._now = 0

    def __enter__(self) -> RewardServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application(client_max_size=0)
        application.router.add_post("/score", self._answer)
        application.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.url, self.judge_url = f"{address}/score", f"{address}/v1"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            fault = self._faults.pop(0) if self._faults else self._always
            response = await fault(request) if fault else None
            return response or web.json_response(self._said(body))
        finally:
            self._now -= 1

    def _said(self, body: Any) -> Any:
        """Return the lengths of responses as their scores, or a judge's verdict."""
        if "answers" in body:
            return [float(len(answer["response"])) for answer in body["answers"]]
        message = {"role": "assistant", "content": self._verdict(body["messages"][0]["content"])}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def main() -> None:
    """Answer some requests, then die with the others under way."""

    async def die(request: web.Request) -> None:
        os._exit(1)

    with RewardServer([slow(0)] * int(sys.argv[1]), always=die) as server:
        print(json.dumps(server.url), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

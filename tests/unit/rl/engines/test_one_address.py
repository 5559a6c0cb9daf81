"""Several engines behind one address, over real connections."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from posttrain.rl.engines.one_address import one_address

MUCH = bytes(range(256)) * 20_000


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[tuple[list[str], list[web.AppRunner]]]:
    """Servers that tell their number and a digest of what they were sent, after a moment, and send it back."""
    urls, runners = [], []
    for number in range(count):

        async def answer(request: web.Request, number: int = number) -> web.Response:
            octets = await request.read()
            await asyncio.sleep(0.02)
            headers = {"Engine": str(number), "Came": hashlib.sha256(octets).hexdigest()}
            return web.Response(body=octets, headers=headers)

        app = web.Application(client_max_size=2 * len(MUCH))
        app.router.add_post("/", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        runners.append(runner)
    try:
        yield urls, runners
    finally:
        for runner in runners:
            await runner.cleanup()


async def ask(session: aiohttp.ClientSession, url: str, octets: bytes) -> str:
    async with session.post(url, data=octets) as response:
        assert await response.read() == octets
        assert response.headers["Came"] == hashlib.sha256(octets).hexdigest()
        return response.headers["Engine"]


def test_engines_are_asked_alike_and_get_what_was_sent() -> None:
    async def run() -> None:
        async with engines(3) as (urls, _), aiohttp.ClientSession() as session:
            with one_address(urls) as url:
                asked = Counter(await asyncio.gather(*(ask(session, url, b"%d" % n) for n in range(30))))
                assert asked == {"0": 10, "1": 10, "2": 10}
                await asyncio.gather(*(ask(session, url, MUCH) for _ in range(6)))
            with pytest.raises(aiohttp.ClientConnectionError):
                await ask(session, url, b"")

    asyncio.run(run())


def test_one_engine_answers_itself() -> None:
    with one_address(["http://127.0.0.1:1"]) as url:
        assert url == "http://127.0.0.1:1"


def test_who_falls_to_an_engine_that_has_gone_is_told() -> None:
    async def run() -> None:
        async with engines(2) as (urls, runners), aiohttp.ClientSession() as session:
            with one_address(urls) as url:
                await runners[1].cleanup()
                told = await asyncio.gather(*(ask(session, url, b"x") for _ in range(4)), return_exceptions=True)
                assert told.count("0") == 2
                assert sum(isinstance(one, aiohttp.ClientError) for one in told) == 2

    asyncio.run(run())

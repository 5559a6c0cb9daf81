#!/bin/sh
# aiohttp 3.14.5: reading a response line by line raises LineTooLong where a line is longer than twice the read buffer.
# It comes from `aiohttp.http_exceptions` and is neither an `aiohttp.ClientError` nor a `ValueError`, so
# `except aiohttp.ClientError` around a client's reading does not catch it.
#
# It means here: whoever reads an answer by lines has to catch `aiohttp.http_exceptions.HttpProcessingError`, too.
#
# Seen on 2026-11-28: "LineTooLong, ClientError: False, ValueError: False"
# Exits with 1 when that changes.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet aiohttp==3.14.5
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys

import aiohttp
from aiohttp import web


async def main():
    async def answer(request):
        return web.Response(text="x" * 100_000 + "\n")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    said = "nothing"
    async with aiohttp.ClientSession(read_bufsize=4096) as session:
        async with session.get(f"http://127.0.0.1:{port}/") as response:
            try:
                async for line in response.content:
                    pass
            except Exception as error:
                kinds = [isinstance(error, kind) for kind in (aiohttp.ClientError, ValueError)]
                said = f"{type(error).__name__}, ClientError: {kinds[0]}, ValueError: {kinds[1]}"
    await runner.cleanup()
    print(said)
    sys.exit(said != "LineTooLong, ClientError: False, ValueError: False")


asyncio.run(main())
PYTHON

"""The HTTP application of a sandbox service: one route, which runs a program (docs/sandbox.md)."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from posttrain.http_answers import parse_json
from posttrain.sandbox.messages import MAX_REQUEST_BYTES, PATH, answer_of, authorization, read_request
from posttrain.sandbox.program import Runner, SandboxUnavailable
from posttrain.sandbox.run import run

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(secret: str, num_sandboxes: int, runner: Runner = run) -> web.Application:
    """Return the application.

    Args:
        secret: What clients must show before their request is read.
        num_sandboxes: Programs at a time; others wait.
        runner: Runs a program.
    """
    turns = asyncio.Semaphore(num_sandboxes)

    async def answer(request: web.Request) -> web.Response:
        try:
            program, limits = read_request(parse_json(await request.read()))
            async with turns:
                return web.json_response(answer_of(await runner(program, limits)))
        except ValueError as error:
            return _refusal(400, str(error))
        except SandboxUnavailable as error:
            return _refusal(503, str(error))

    application = web.Application(middlewares=[_only_with(secret)], client_max_size=MAX_REQUEST_BYTES)
    application.router.add_post(PATH, answer)
    return application


def _only_with(secret: str) -> Any:
    wanted = authorization(secret)["Authorization"].encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="surrogateescape"), wanted):
            return await handler(request)
        refusal = _refusal(401, "the request lacks the secret")
        refusal.force_close()
        return refusal

    return check


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": reason}), content_type="application/json")

"""An engine with SGLang's API that samples nothing and may end with SIGKILL at one of its calls.

    python -m tests.support.mortal_engine PORT LAST_CALL

Responses and their lengths follow from the seed; half of them are `RIGHT`. A token has the version of the weights that
the engine has when it samples it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from benchmarks.scripted_engine import ScriptedEngine

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS

RIGHT, LONGEST = "7777", 8
TOKEN_SECONDS = 0.002
DIGIT = CHARACTERS.index("7")


class MortalEngine(ScriptedEngine):
    """The state of the engine.

    Args:
        last_call: The call, from 1, at which the process ends; 0: none.
    """

    def __init__(self, last_call: int):
        super().__init__(TOKEN_SECONDS, 0, 0)
        self._num_calls, self._last_call, self._num_aborts = 0, last_call, 0

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer the one request, token by token."""
        ((params),) = body["sampling_params"]
        drawn = random.Random(params["sampling_seed"])
        length = len(RIGHT) if drawn.random() < 0.5 else drawn.randint(1, LONGEST)
        versions, before, reason = list[str | None](), self._num_aborts, "stop"
        for _ in range(min(length, params["max_new_tokens"])):
            await asyncio.sleep(self._token_seconds)
            await self._runs.wait()
            if self._num_aborts > before:
                reason = "abort"
                break
            versions.append(self._version)
        return [_answer(versions, reason)]

    async def abort(self, body: dict[str, Any]) -> dict[str, Any]:
        """End all requests with the tokens that they have."""
        self._num_aborts += 1
        return {"status": "ok"}

    def _handler(self, call: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        handle = super()._handler(call)

        async def count(request: web.Request) -> web.Response:
            self._num_calls += 1
            if self._num_calls == self._last_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return await handle(request)

        return count


def _answer(versions: list[str | None], reason: str) -> dict[str, Any]:
    spans = list[dict[str, Any]]()
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": version, "start": place, "end": place + 1})
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-1.0, DIGIT, None]] * len(versions),
        "weight_version": versions[-1] if versions else None,
        "weight_versions": spans,
    }
    return {"output_ids": [DIGIT] * len(versions), "meta_info": meta}


def main(port: int, last_call: int) -> None:
    """Serve until the process ends."""

    async def make() -> web.Application:
        application = web.Application(client_max_size=1 << 30)
        application.add_routes(MortalEngine(last_call).routes())
        return application

    web.run_app(make(), host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

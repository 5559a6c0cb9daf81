"""Requests to engines of which some only prefill and the others only decode: each goes to one of both.

The two find each other by what the request says: where the prefilling engine is met (`bootstrap_host`, `_port`), and a
number of its own for each prompt (`bootstrap_room`). The KV cache goes from one to the other without us.

SGLang's router (sglang-router 0.3.2) does the same between client and engines, and chooses engines by their load. Here
the request's number chooses, so that a run that goes on asks as it asked before; a process less can fail.

Source of the words: SGLang 0.5.23, `GenerateReqInput` in srt/managers/io_struct.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from posttrain.rl.engines.calls import Engine, EngineCalls, EngineError
from posttrain.rl.engines.routes import ASKED, PREFILLED, TOLD

# Rooms are 63 bits. The upper ones are those of one client, so that nobody waits in a room of a run before it.
LOWER_BITS = 40


class PrefillPairs:
    """Sends requests to pairs of engines.

    Args:
        calls: Speaks to engines.
        prefilling: Those that only prefill.
    """

    def __init__(self, calls: EngineCalls, prefilling: Sequence[Engine]):
        self._calls, self._prefilling = calls, prefilling
        self._ports: dict[int, int] = {}
        self._rooms = count(secrets.randbits(63 - LOWER_BITS) << LOWER_BITS)

    async def generate(self, decoding: Engine, body: Mapping[str, Any], request_number: int) -> Any:
        """Return what an engine that decodes answers to a batched /generate.

        Neither is asked again when a connection fails: a room is entered once.

        Raises:
            EngineError: One of both has failed, and the other one was let go; or they have different weights.
        """
        prefill = self._prefilling[request_number % len(self._prefilling)]
        meeting = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": await self._port(prefill),
            "bootstrap_room": [next(self._rooms) for _ in body["input_ids"]],
        }
        both = [
            asyncio.ensure_future(self._calls.call(engine, "POST", "/generate", {**body, **meeting}))
            for engine in (prefill, decoding)
        ]
        try:
            prefilled, decoded = await asyncio.gather(*both)
        finally:
            for call in both:
                call.cancel()
        if (one := _versions(prefilled)) != (other := _versions(decoded)):
            raise EngineError(f"{prefill} has prefilled with weights {one}, {decoding} decoded with {other}")
        if body.get(ASKED):
            _tell_routes_of_prompts(prefilled, decoded)
        return decoded

    async def _port(self, prefill: Engine) -> int:
        if prefill.number not in self._ports:
            told = await self._calls.call(prefill, "GET", "/get_server_info", may_repeat=True)
            self._ports[prefill.number] = int(told["disaggregation_bootstrap_port"])
        return self._ports[prefill.number]


def _tell_routes_of_prompts(prefilled: Any, decoded: Any) -> None:
    """Add to decoded answers where the prompts' tokens went, which only the engine that has read them knows."""
    for item, answer in zip(prefilled, decoded, strict=True):
        answer["meta_info"][PREFILLED] = item["meta_info"].get(TOLD)


def _versions(answer: Any) -> set[Any]:
    """Return the versions of the weights that a batched answer names; what is no such answer has none."""
    items = answer if isinstance(answer, list) else []
    return {item["meta_info"].get("weight_version") for item in items if isinstance(item, dict) and "meta_info" in item}

"""Sends each request to one prefill engine and one decode engine (prefill-decode disaggregation).

The request tells both engines how to connect: the prefill engine's address (`bootstrap_host`, `_port`) and a unique
number for each prompt (`bootstrap_room`). They transfer the KV cache directly.

SGLang's router (sglang-router 0.3.2) does the same as a separate process, and chooses engines by load. Here the request
number chooses, so that a resumed run sends the same requests to the same engines, and one process fewer can fail.

Source of the field names: SGLang 0.5.23, `GenerateReqInput` in srt/managers/io_struct.py.
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

# Room numbers have 63 bits. The upper bits identify the client, so that no engine waits in a room of an earlier run.
LOWER_BITS = 40


class PrefillPairs:
    """Sends requests to pairs of a prefill and a decode engine.

    Args:
        calls: Makes HTTP calls to engines.
        prefilling: The prefill engines.
    """

    def __init__(self, calls: EngineCalls, prefilling: Sequence[Engine]):
        self._calls, self._prefilling = calls, prefilling
        self._ports: dict[int, int] = {}
        self._rooms = count(secrets.randbits(63 - LOWER_BITS) << LOWER_BITS)

    async def generate(self, decoding: Engine, body: Mapping[str, Any], request_number: int) -> Any:
        """Return the decode engine's answer to a batched /generate.

        A failed connection is not retried, because each room can be used only once.

        Raises:
            EngineError: One engine failed (the other's request is cancelled), or their weights differ.
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
    """Add the prompt tokens' expert routes, which only the prefill engine knows, to the decoded answers."""
    for item, answer in zip(prefilled, decoded, strict=True):
        answer["meta_info"][PREFILLED] = item["meta_info"].get(TOLD)


def _versions(answer: Any) -> set[Any]:
    """Return the weight versions of the first tokens in a batched answer; empty for any other answer."""
    items = answer if isinstance(answer, list) else []
    metas = [item["meta_info"] for item in items if isinstance(item, dict) and "meta_info" in item]
    return {(meta.get("weight_versions") or [{"version": meta.get("weight_version")}])[0]["version"] for meta in metas}

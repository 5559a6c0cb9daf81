"""Answers vLLM's `/inference/v1/generate`, which verifiers' training client asks, from an engine's `/generate`.

Tokens and log-probabilities are the engine's own. The client's `Authorization` header is passed on, so who knows the
engine's secret may ask, and nobody else.

Source of the field names: renderers 0.1.12, client.py; SGLang 0.5.23, srt/sampling/sampling_params.py.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

MAX_REQUEST_BYTES = 64 << 20
# vLLM's sampling parameters, by SGLang's names.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
SAME = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"}
SAME |= {"repetition_penalty", "frequency_penalty", "presence_penalty"}
# Those that say what is answered, not what is sampled; and those with a value that changes nothing.
OF_ANSWERS = {"logprobs", "skip_special_tokens", "routed_experts_prompt_start"}
NEUTRAL = {"n": 1}


class TokenEndpoint:
    """A proxy for an engine.

    Args:
        address: Of the engine, "http://host:port".
    """

    def __init__(self, address: str):
        self._address = address

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.add_routes([web.post("/inference/v1/generate", self._generate), web.get("/v1/models", self._models)])
        app.cleanup_ctx.append(self._open_session)
        return app

    async def _open_session(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(self._address, timeout=aiohttp.ClientTimeout(total=None)) as self._session:
            yield

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = generate_body(await request.json())
        except (ValueError, TypeError, LookupError) as error:
            return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=400)
        status, answer = await self._ask(request, "POST", "/generate", body)
        if status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort":
            status, answer = 503, {"error": {"message": "the engine has ended the request"}}
        return web.json_response(vllm_answer(answer) if status == 200 else answer, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        status, answer = await self._ask(request, "GET", "/v1/models")
        return web.json_response(answer, status=status)

    async def _ask(self, request: web.Request, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the engine's status and answer; 502 if it cannot be asked."""
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        try:
            async with self._session.request(method, path, json=body, headers=headers) as answer:
                if answer.status == 200:
                    return 200, await answer.json()
                return answer.status, {"error": {"message": await answer.text()}}
        except (aiohttp.ClientError, ValueError) as error:
            return 502, {"error": {"message": f"{self._address}: {type(error).__name__}: {error}"}}


def generate_body(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an engine's `/generate` for one of vLLM's.

    Raises:
        ValueError: It has a parameter that the engine does not know, which would change what is sampled, no limit of
            tokens, or images.
        KeyError: It has no tokens.
    """
    if images := [name for name in ("features", "content_parts") if asked.get(name)]:
        raise ValueError(f"{images[0]}: images are not supported")
    given = {name: value for name, value in asked["sampling_params"].items() if value is not None}
    if "max_tokens" not in given:
        raise ValueError("max_tokens is missing; engines have different defaults")
    parameters = {RENAMED.get(name, name): value for name, value in given.items() if name in (*RENAMED, *SAME)}
    others = given.keys() - {*RENAMED} - SAME - OF_ANSWERS
    if wrong := sorted(name for name in others if given[name] != NEUTRAL.get(name)):
        raise ValueError(f"{wrong[0]}={given[wrong[0]]!r} is not supported")
    # vLLM's 0 is SGLang's -1: all tokens.
    parameters |= {"top_k": -1} if parameters.get("top_k") == 0 else {}
    salt = {"extra_key": asked["cache_salt"]} if asked.get("cache_salt") else {}
    return {"input_ids": asked["token_ids"], "sampling_params": parameters, "return_logprob": True, **salt}


def vllm_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's answer for one of an engine's `/generate`."""
    meta = answer["meta_info"]
    sampled = [(int(token), float(logprob)) for logprob, token, *_ in meta["output_token_logprobs"]]
    choice = {
        "index": 0,
        "token_ids": [token for token, _ in sampled],
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in sampled]},
        "finish_reason": meta["finish_reason"]["type"],
        "weight_version": meta.get("weight_version"),
    }
    return {"request_id": str(meta.get("id") or uuid.uuid4().hex), "choices": [choice]}

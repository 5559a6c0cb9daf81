"""The embedded engine's HTTP server, with SGLang's API.

Answers have SGLang's fields except text: only OpenAI's endpoints (`openai_endpoints`) read and write text. A request
that cannot be served, or an unknown endpoint, gets 400 and OpenAI's {"error": {"message": ...}}; any request without
the engine's secret gets 401.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from aiohttp import web

from posttrain import __version__
from posttrain.rl.engines.embedded.generation import Response
from posttrain.rl.engines.embedded.model import LoadedModel
from posttrain.rl.engines.embedded.openai_endpoints import OpenAIEndpoints
from posttrain.rl.engines.embedded.requests import (
    ModelLimits,
    ParsedRequest,
    RequestError,
    Row,
    parse_request,
    read_json,
)
from posttrain.rl.engines.embedded.routes import has_experts
from posttrain.rl.engines.embedded.weight_endpoints import WeightEndpoints
from posttrain.rl.engines.embedded.worker import Work, Worker
from posttrain.rl.engines.routes import TOLD
from posttrain.rl.engines.secret import authorization

log = logging.getLogger(__name__)

# Generate requests are far smaller.
SMALL_BODY_BYTES = 64 << 20
PAUSE_MODES = ("abort", "in_place", "retract")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(loaded: LoadedModel, worker: Worker, secret: str) -> web.Application:
    """Return the engine's HTTP application; the worker must have been started.

    Args:
        loaded: The model that `worker` runs.
        worker: Runs the requests.
        secret: Requests without it are refused on every route, before the body is read.
    """
    # The largest valid body is all weights at once, including an MTP layer, in base64.
    largest = max(SMALL_BODY_BYTES, 4 * loaded.weights.num_bytes)
    application = web.Application(client_max_size=largest, middlewares=[_only_with(secret), _refuse_clearly])
    for part in (Endpoints(loaded, worker), OpenAIEndpoints(loaded, worker), WeightEndpoints(loaded, worker)):
        application.add_routes(part.routes())
    application.router.add_route("*", "/{path:.*}", _unknown_endpoint)
    return application


class Endpoints:
    """Generation, health, information, pause and abort."""

    def __init__(self, loaded: LoadedModel, worker: Worker):
        self._loaded, self._worker = loaded, worker
        self._limits = ModelLimits(
            loaded.vocab_size, loaded.max_positions, loaded.eos_token_ids, has_experts(loaded.model)
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes of these endpoints."""
        informing = {
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/get_model_info": self.model_info,
            "/model_info": self.model_info,
        }
        return [
            web.post("/generate", self.generate),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            *(web.get(path, handler) for path, handler in informing.items()),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            web.post("/abort_request", self.abort_request),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one /generate request."""
        body = await read_json(request)
        parsed = parse_request(body, self._limits)
        with_logprobs = bool(body.get("return_logprob"))
        if parsed.stream:
            return await self._stream(request, parsed, with_logprobs)
        started = time.perf_counter()
        work = Work(parsed.rows)
        responses = await asyncio.wrap_future(self._worker.submit(work))
        seconds = time.perf_counter() - started
        answers = [_answer(response, work.weight_version, with_logprobs, seconds) for response in responses]
        for response, answer in zip(responses, answers, strict=True):
            answer["meta_info"] |= _told_of_prompt(response, parsed.told_from)
        return web.json_response(answers if parsed.is_batch else answers[0])

    async def health(self, request: web.Request) -> web.Response:
        """Report whether the worker is alive."""
        return web.Response(status=200 if self._worker.is_alive else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Report whether the worker can generate one token."""
        row = Row("health", (0,), 1, 0.0, 0, frozenset())
        await asyncio.wrap_future(self._worker.submit(Work((row,))))
        return web.Response(status=200)

    async def server_info(self, request: web.Request) -> web.Response:
        """Describe the server and its counters."""
        model = self._loaded.model
        return web.json_response(
            {
                "engine": "embedded",
                "version": __version__,
                "model_path": str(self._loaded.folder),
                "dtype": str(model.dtype).removeprefix("torch."),
                "tp_size": 1,
                "weight_version": self._loaded.weights.version,
                "attention_implementation": model.config._attn_implementation,
                "experts_implementation": model.config._experts_implementation,
                **asdict(self._worker.counters),
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        """Describe the model."""
        return web.json_response(
            {
                "model_path": str(self._loaded.folder),
                "is_generation": True,
                "weight_version": self._loaded.weights.version,
                "model_type": self._loaded.model_type,
                "architectures": [type(self._loaded.model).__name__],
                "vocab_size": self._loaded.vocab_size,
                "max_position_embeddings": self._loaded.max_positions,
                "eos_token_id": sorted(self._loaded.eos_token_ids),
            }
        )

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Pause generation; see `Worker.pause`."""
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode {mode!r}: the embedded engine knows {', '.join(map(repr, PAUSE_MODES))}")
        self._worker.pause(mode)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Resume generation."""
        self._worker.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, request: web.Request) -> web.Response:
        """Abort one request by its id, or all."""
        body = await read_json(request)
        self._worker.abort(str(body.get("rid", "")), everything=bool(body.get("abort_all", False)))
        return web.Response(status=200)

    async def _stream(self, request: web.Request, parsed: ParsedRequest, with_logprobs: bool) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        async for chunk in self._chunks(parsed, with_logprobs):
            await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def _chunks(self, parsed: ParsedRequest, with_logprobs: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield the response so far after every token, as SGLang streams it."""
        started = time.perf_counter()
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

        def on_step(responses: Sequence[Response]) -> None:
            seconds = time.perf_counter() - started
            answer = _answer(responses[0], self._loaded.weights.version, with_logprobs, seconds)
            loop.call_soon_threadsafe(chunks.put_nowait, answer)

        done = asyncio.wrap_future(self._worker.submit(Work(parsed.rows, on_step)))
        while not done.done() or not chunks.empty():
            waiting = asyncio.ensure_future(chunks.get())
            await asyncio.wait((waiting, done), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield waiting.result()
            else:
                waiting.cancel()
        await done


def _answer(response: Response, version: str | None, with_logprobs: bool, seconds: float) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": response.row.request_id,
        "finish_reason": response.finish_reason,
        "prompt_tokens": len(response.row.input_ids),
        "completion_tokens": len(response.output_ids),
        "weight_version": response.versions[-1] if response.versions else version,
        "weight_versions": _version_spans(response.versions),
        "e2e_latency": seconds,
    }
    if with_logprobs:
        pairs = zip(response.logprobs, response.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if response.row.tells_routes:
        meta[TOLD] = base64.b64encode(np.concatenate(response.routes).tobytes()).decode()
    return {"output_ids": list(response.output_ids), "meta_info": meta}


def _version_spans(versions: Sequence[str | None]) -> list[dict[str, Any]]:
    """Return SGLang's spans of consecutive tokens that one weight version computed."""
    spans, end = [], 0
    for version, tokens in itertools.groupby(versions):
        start, end = end, end + len([*tokens])
        spans.append({"version": version, "start": start, "end": end})
    return spans


def _told_of_prompt(response: Response, told_from: int) -> dict[str, Any]:
    """Return SGLang's prompt log-probability entries; the first token's has no log-probability."""
    if response.prompt_scores is None:
        return {}
    tokens, scores = response.row.input_ids[told_from:], response.prompt_scores
    values = [None, *scores.logprobs[told_from:]][: len(tokens)]
    told: dict[str, Any] = {
        "input_token_logprobs": [[value, token, None] for value, token in zip(values, tokens, strict=True)]
    }
    if response.row.num_alternatives:
        likeliest = [[[value, token, None] for token, value in place] for place in scores.alternatives[told_from:]]
        told["input_top_logprobs"] = [None, *likeliest][: len(tokens)]
    return told


def _only_with(secret: str) -> Any:
    (wanted,) = authorization(secret).values()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hmac.compare_digest(
            request.headers.get("Authorization", "").encode(errors="surrogateescape"), wanted.encode()
        ):
            return await handler(request)
        refusal = _refusal("the secret is not shown", 401, "authentication_error")
        refusal.force_close()
        return refusal

    return check


@web.middleware
async def _refuse_clearly(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _refusal(str(error), 400, "invalid_request_error", error.param)
    except (RuntimeError, ArithmeticError, MemoryError) as error:
        return _refusal(f"{type(error).__name__}: {error}", 500, "server_error")


def _refusal(message: str, code: int, kind: str, param: str | None = None) -> web.Response:
    """Return an error in OpenAI's shape."""
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=code)


async def _unknown_endpoint(request: web.Request) -> web.Response:
    raise RequestError(f"{request.method} {request.path} is not an endpoint of the embedded engine")

"""Sends a streamed request to an engine or an OpenAI-compatible endpoint, and records when its tokens arrive.

Times are when this process reads a chunk. A request rejected before its answer begins (HTTP 429 or 503, no connection)
is retried a few times; its time counts from the first attempt, because the user waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from posttrain.errors import one_line
from posttrain.http_answers import (
    MALFORMED,
    MAX_ERROR_CHARACTERS,
    PLAIN,
    OversizedAnswerError,
    parse_json,
    read_bounded,
    read_refusal,
)
from posttrain.rl.engines.calls import BAD_HTTP, NUM_CONNECTION_RETRIES, RETRY_SECONDS, EngineError
from posttrain.rl.engines.secret import authorization

COMPLETIONS, CHAT, GENERATE = "completions", "chat", "generate"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions", GENERATE: "/generate"}
# HTTP 429 and 503: too many requests, and temporarily unavailable.
TURNED_AWAY = (429, 503)
# No model has a longer context.
MAX_COUNT = 1 << 40
# Limit on a stream's bytes: a base and an allowance per token, for metadata and keep-alives.
STREAM_BYTES, STREAM_BYTES_OF_A_TOKEN = 1 << 20, 1 << 14
# Fields of a chat chunk that may hold parts of an answer.
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Endpoint:
    """The address of a served model.

    Args:
        url: "http://host:port".
        model: The model's name at the endpoint; /generate needs none.
        api: `COMPLETIONS`, `CHAT`, or SGLang's own `GENERATE`.
        secret: Bearer token; empty: none.
    """

    url: str
    model: str
    api: str = COMPLETIONS
    secret: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        return authorization(self.secret) if self.secret else {}


@dataclass(frozen=True)
class StreamedRequest:
    """A request for a response of fixed length.

    Args:
        prompt: Token ids or text; for `CHAT` messages.
        output_tokens: Exact length of the response: the end token is ignored.
        seed: Sampling seed; not sent for greedy decoding.
        temperature: 0 is greedy.
    """

    prompt: Prompt
    output_tokens: int
    seed: int
    temperature: float = 0.0


@dataclass
class Timeline:
    """Arrival times of one request's tokens, in seconds of this machine's monotonic clock.

    Args:
        sent: Time of the first attempt.
        chunks: Time at which each chunk with tokens was read.
        output_tokens: Tokens of the response, by the endpoint's count if given.
        input_tokens: Tokens of the prompt, likewise.
        retries: Number of rejections.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    output_tokens: int = 0
    input_tokens: int = 0
    retries: int = 0


async def served_models(session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, int | None]:
    """Return an endpoint's models, each with its maximum context if reported.

    Raises:
        EngineError: Nothing answers, or the endpoint has no list of models.
    """
    path = f"{endpoint.url}/v1/models"
    try:
        async with session.get(path, headers=endpoint.headers, allow_redirects=False) as response:
            if response.status != 200:
                refusal = await read_refusal(response.status, response.headers, response.content.iter_any())
                raise EngineError(f"{path}: {refusal}")
            answer = parse_json(await read_bounded(response.content.iter_any()))
        return {str(model["id"]): _count(model.get("max_model_len")) for model in answer["data"]}
    except (*BAD_HTTP, TimeoutError, *MALFORMED) as error:
        raise EngineError(f"{path} does not list models: {one_line(repr(error))[:MAX_ERROR_CHARACTERS]}") from error


def _count(value: Any) -> int | None:
    """Return an endpoint's count, None if absent."""
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise TypeError(f"{value!r:.80} is no count of tokens")
    return value


def open_session(total_seconds: float, **options: Any) -> aiohttp.ClientSession:
    """Return a session with a request timeout that refuses compressed answers."""
    timeout = aiohttp.ClientTimeout(total=total_seconds)
    return aiohttp.ClientSession(timeout=timeout, headers=PLAIN, auto_decompress=False, **options)


async def stream(session: aiohttp.ClientSession, endpoint: Endpoint, request: StreamedRequest) -> Timeline:
    """Send a request and record when its tokens arrive.

    Raises:
        EngineError: The endpoint refuses, breaks off, reports an error, or returns another number of tokens.
    """
    data = json.dumps(_body(endpoint, request)).encode()
    timeline = Timeline(time.perf_counter())
    most_bytes = STREAM_BYTES + request.output_tokens * STREAM_BYTES_OF_A_TOKEN
    while (wait := await _try(session, endpoint, data, timeline, most_bytes)) is not None:
        timeline.retries += 1
        await asyncio.sleep(wait)
    if timeline.output_tokens != request.output_tokens or not timeline.chunks:
        count = f"{timeline.output_tokens} of {request.output_tokens} tokens"
        raise EngineError(f"{endpoint.url} answered with {count}: does it know ignore_eos, and has its context room?")
    return timeline


async def _try(
    session: aiohttp.ClientSession, endpoint: Endpoint, data: bytes, timeline: Timeline, most_bytes: int
) -> float | None:
    """Send once and read the answer; returns the seconds to wait if the request was rejected."""
    path = PATHS[endpoint.api]
    wait = RETRY_SECONDS * 2**timeline.retries if timeline.retries < NUM_CONNECTION_RETRIES else None
    headers = {"Content-Type": "application/json", **endpoint.headers}
    try:
        async with session.post(endpoint.url + path, data=data, headers=headers, allow_redirects=False) as response:
            if response.status in TURNED_AWAY and wait is not None:
                return wait
            if response.status != 200:
                refusal = await read_refusal(response.status, response.headers, response.content.iter_any())
                raise EngineError(f"{endpoint.url}{path}: {refusal}")
            left = most_bytes
            async for line in response.content:
                left -= len(line)
                if left < 0:
                    raise OversizedAnswerError(f"an answer of more than {most_bytes} bytes")
                if line.startswith(b"data: {"):
                    _take(timeline, time.perf_counter(), parse_json(line[6:]), endpoint)
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
        if timeline.chunks or wait is None or isinstance(error, TimeoutError):
            raise EngineError(f"{endpoint.url}{path}: the stream broke off: {error!r}") from error
        return wait
    except (*BAD_HTTP, *MALFORMED) as error:
        said = one_line(repr(error))[:MAX_ERROR_CHARACTERS]
        raise EngineError(f"{endpoint.url}{path} answers in another way than it should: {said}") from error
    return None


def _take(timeline: Timeline, now: float, chunk: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Record a chunk: its time, if it has tokens, and the token count so far."""
    if "error" in chunk:
        raise EngineError(f"{endpoint.url} tells within its answer: {str(chunk['error'])[:MAX_ERROR_CHARACTERS]}")
    if endpoint.api == GENERATE:
        meta = chunk.get("meta_info", {})
        count = _count(meta.get("completion_tokens")) or len(chunk["output_ids"])
        timeline.input_tokens = _count(meta.get("prompt_tokens")) or timeline.input_tokens
    elif usage := chunk.get("usage"):
        count = _count(usage["completion_tokens"]) or 0
        timeline.input_tokens = _count(usage["prompt_tokens"]) or 0
    else:
        # Without counts, assume one token per chunk with text, until the last chunk reports the total.
        count = timeline.output_tokens + any(map(_has_text, chunk.get("choices", ())))
    if count > timeline.output_tokens and (endpoint.api == GENERATE or chunk.get("choices")):
        timeline.chunks.append(now)
    timeline.output_tokens = count


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in _TEXTS))


def _body(endpoint: Endpoint, request: StreamedRequest) -> dict[str, Any]:
    length, same = request.output_tokens, {"ignore_eos": True, "temperature": request.temperature}
    # Greedy decoding needs no seed, for which an engine would keep a generator per request.
    seed = {"sampling_seed" if endpoint.api == GENERATE else "seed": request.seed} if request.temperature else {}
    if endpoint.api == GENERATE:
        sampling = {"max_new_tokens": length, **seed, **same}
        return {"input_ids": list(request.prompt), "sampling_params": sampling, "stream": True}
    prompt = {"messages": request.prompt} if endpoint.api == CHAT else {"prompt": request.prompt}
    # Counts in every chunk distinguish tokens without text (half a character) from chunks without tokens.
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = {"max_tokens": length, **seed, "stream": True, "stream_options": options, **same}
    return {"model": endpoint.model, **prompt, **told}

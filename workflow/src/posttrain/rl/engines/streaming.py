"""One streamed request to an engine or to any endpoint that speaks OpenAI's interface, and when its tokens came.

Times are those at which this process has read a chunk. A request that is turned away before its answer begins (HTTP 429
or 503, no connection) is sent again a few times; its time runs on from the first sending, since its sender waits.
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
# Too many requests, and no room for one now.
TURNED_AWAY = (429, 503)
# A context has fewer tokens.
MAX_COUNT = 1 << 40
# A stream may have so many bytes, and so many more for each token: names, counts and pauses come with it.
STREAM_BYTES, STREAM_BYTES_OF_A_TOKEN = 1 << 20, 1 << 14
# What a chunk of a conversation may hold of an answer.
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Endpoint:
    """Where a model answers.

    Args:
        url: "http://host:port".
        model: What the endpoint calls it; /generate has no names.
        api: `COMPLETIONS`, `CHAT`, or SGLang's own `GENERATE`.
        secret: Shown as a bearer's token; empty: none.
    """

    url: str
    model: str
    api: str = COMPLETIONS
    secret: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What every request shows."""
        return authorization(self.secret) if self.secret else {}


@dataclass(frozen=True)
class StreamedRequest:
    """A response of a fixed length that is asked for.

    Args:
        prompt: Token ids or text; for `CHAT` messages.
        output_tokens: The response has exactly so many: the end token is ignored.
        seed: Of sampling; not sent where nothing is sampled.
        temperature: 0 takes the likeliest token.
    """

    prompt: Prompt
    output_tokens: int
    seed: int
    temperature: float = 0.0


@dataclass
class Timeline:
    """When the tokens of one request came, in seconds of this machine's monotonic clock.

    Args:
        sent: When the request was sent for the first time.
        chunks: When each chunk with tokens was read.
        output_tokens: Tokens of the response, by the endpoint's count where it gives one.
        input_tokens: Tokens of the prompt, the same.
        retries: How often it was turned away.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    output_tokens: int = 0
    input_tokens: int = 0
    retries: int = 0


async def served_models(session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, int | None]:
    """Return the models that an endpoint names, each with its longest context where that is told.

    Raises:
        EngineError: Nothing answers there, or something that has no list of models.
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
    """Return a count that an endpoint gives; None where it gives none."""
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise TypeError(f"{value!r:.80} is no count of tokens")
    return value


def open_session(total_seconds: float, **options: Any) -> aiohttp.ClientSession:
    """Return a session that reads no compressed answers, and gives up a request after some time."""
    timeout = aiohttp.ClientTimeout(total=total_seconds)
    return aiohttp.ClientSession(timeout=timeout, headers=PLAIN, auto_decompress=False, **options)


async def stream(session: aiohttp.ClientSession, endpoint: Endpoint, request: StreamedRequest) -> Timeline:
    """Send a request and note when its tokens come.

    Raises:
        EngineError: The endpoint refuses, breaks off, tells an error, or answers with another number of tokens.
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
    """Send once and read the answer; seconds to wait where the request was turned away."""
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
    """Note a chunk: its time, if tokens came with it, and how many there are so far."""
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
        # Who counts nothing is taken to send a token with every text, until the last chunk says how many there were.
        count = timeline.output_tokens + any(map(_has_text, chunk.get("choices", ())))
    if count > timeline.output_tokens and (endpoint.api == GENERATE or chunk.get("choices")):
        timeline.chunks.append(now)
    timeline.output_tokens = count


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in _TEXTS))


def _body(endpoint: Endpoint, request: StreamedRequest) -> dict[str, Any]:
    length, same = request.output_tokens, {"ignore_eos": True, "temperature": request.temperature}
    # The likeliest token needs no seed, for which an engine would keep a generator for each request.
    seed = {"sampling_seed" if endpoint.api == GENERATE else "seed": request.seed} if request.temperature else {}
    if endpoint.api == GENERATE:
        sampling = {"max_new_tokens": length, **seed, **same}
        return {"input_ids": list(request.prompt), "sampling_params": sampling, "stream": True}
    prompt = {"messages": request.prompt} if endpoint.api == CHAT else {"prompt": request.prompt}
    # Counts with every chunk tell tokens without a text, half a character say, from chunks without a token.
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = {"max_tokens": length, **seed, "stream": True, "stream_options": options, **same}
    return {"model": endpoint.model, **prompt, **told}

"""Calls to every engine of a run, over HTTP: the transport of `rl.engines.client`."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from posttrain.http_answers import MALFORMED, MAX_ANSWER_BYTES, PLAIN, parse_json, read_bounded, read_refusal
from posttrain.rl.engines.routes import BINARY, read_behind_json
from posttrain.rl.engines.secret import authorization

log = logging.getLogger(__name__)

# A connection that the server has just closed fails only when used; the second try opens a new one, and three survive a
# moment without free ports. An engine that is away longer has exited, which the supervisor detects.
NUM_CONNECTION_RETRIES = 3
RETRY_SECONDS = 0.2  # doubled with each try
# Poll readiness often, because training waits for it, with a long timeout, because an engine may not answer while it
# loads its model.
PROBE_TIMEOUT_SECONDS = 10.0
PROBE_INTERVAL_SECONDS = 0.1
# SGLang answers after its next token at the latest, whatever its load; the longest wait is for one batch.
SILENCE_SECONDS = 60.0
# aiohttp's error for an overlong line is not a ClientError.
BAD_HTTP = (aiohttp.ClientError, HttpProcessingError)


class EngineError(RuntimeError):
    """An engine gave no answer or a wrong one; names the engine."""


class NoAnswerError(EngineError):
    """An engine was unreachable or timed out; another engine may answer.

    Args:
        text: What happened.
        engine: The engine, where several take part in a request.
    """

    def __init__(self, text: str, engine: Engine | None = None):
        super().__init__(text)
        self.engine = engine


@dataclass(frozen=True)
class Engine:
    """An engine's identity in errors."""

    number: int
    url: str

    def __str__(self) -> str:
        return f"engine {self.number} ({self.url})"


class EngineCalls:
    """Makes HTTP calls to engines; an async context manager.

    Subclasses lower `_max_answer_bytes` for engines that were not started for the run.

    Args:
        urls: Engine URLs, "http://host:port".
        secret: The engines' shared secret.
        request_timeout_seconds: Every answer must arrive within this.
    """

    # Enough for tokens, log-probabilities and routes of many samples.
    _max_answer_bytes = 16 << 30

    def __init__(self, urls: Sequence[str], secret: str, request_timeout_seconds: float):
        assert urls, "a client needs at least one engine"
        self._engines = [Engine(number, url.rstrip("/")) for number, url in enumerate(urls)]
        self._timeout_seconds, self._headers = request_timeout_seconds, authorization(secret)
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0

    async def __aenter__(self) -> Self:
        # Connections are not kept alive: the server drops idle ones after seconds, a training step takes longer, and
        # a weight update that fails on a dropped connection must not be repeated.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {**PLAIN, **self._headers}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()
        self._session = None

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._engines)

    async def call_all(
        self, method: str, path: str, body: dict[str, Any] | None = None, may_repeat: bool = False
    ) -> list[Any]:
        """Make one call to all engines concurrently; raises one error that names all failed engines."""
        return await self.call_each(method, path, [body] * len(self._engines), may_repeat)

    async def call_each(
        self, method: str, path: str, bodies: Sequence[dict[str, Any] | None], may_repeat: bool
    ) -> list[Any]:
        """Call each engine concurrently with its own arguments; see `call_all`."""
        told = zip(self._engines, bodies, strict=True)
        calls: list[Awaitable[Any]] = [self.call(engine, method, path, body, may_repeat) for engine, body in told]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
        if failures:
            listed = "\n  ".join(map(str, failures))
            raise EngineError(f"{path} failed on {len(failures)} of {len(self._engines)} engines:\n  {listed}")
        return list(answers)

    async def call(
        self,
        engine: Engine,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        may_repeat: bool = False,
    ) -> Any:
        """Make one call to one engine.

        Args:
            engine: The engine.
            method: HTTP method.
            path: Path and query.
            body: JSON; None for no body.
            may_repeat: The call is idempotent and is retried when the connection fails.

        Raises:
            EngineError: No answer in time, or an error answer.
        """
        num_tries = 1 + (NUM_CONNECTION_RETRIES if may_repeat else 0)
        for attempt in range(1, num_tries + 1):
            try:
                return await self._call_once(engine, method, path, body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if attempt == num_tries:
                    raise NoAnswerError(
                        f"{engine}: {method} {path}: no connection after {attempt} tries: {error}", engine
                    ) from error
                self.num_retries += 1
                log.warning("%s: %s %s: %s; try %d of %d", engine, method, path, error, attempt + 1, num_tries)
                await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _call_once(self, engine: Engine, method: str, path: str, body: dict[str, Any] | None) -> Any:
        assert self._session is not None, "use the client as an async context manager"
        timeout = aiohttp.ClientTimeout(total=self._seconds_of(method))
        try:
            async with self._session.request(
                method, engine.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                chunks = response.content.iter_any()
                if response.status != 200:
                    refusal = await read_refusal(response.status, response.headers, chunks)
                    raise EngineError(f"{engine}: {method} {path}: {refusal}")
                most = MAX_ANSWER_BYTES if method == "GET" else self._max_answer_bytes
                content = await read_bounded(chunks, most)
                if response.content_type == BINARY:
                    return read_behind_json(content)
                return parse_json(content) if response.content_type == "application/json" else content.decode()
        except TimeoutError as error:
            raise NoAnswerError(f"{engine}: {method} {path}: no answer within {timeout.total:g} s", engine) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            raise
        except (*BAD_HTTP, struct.error, *MALFORMED) as error:
            what = "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read"
            raise EngineError(f"{engine}: {method} {path}: the answer {what}: {error}") from error

    def _seconds_of(self, method: str) -> float:
        """Return the timeout of a request."""
        return self._timeout_seconds

    @property
    def _silence_seconds(self) -> float:
        """Return how long an engine may stay silent after a timeout; at most the request timeout."""
        return min(SILENCE_SECONDS, self._timeout_seconds)

    async def _is_healthy(self, engine: Engine, within_seconds: float) -> bool | None:
        """Return an engine's health; None if something listens there but does not answer."""
        assert self._session is not None, "use the client as an async context manager"
        longest = min(PROBE_TIMEOUT_SECONDS, self._silence_seconds, within_seconds)
        timeout = aiohttp.ClientTimeout(total=max(PROBE_INTERVAL_SECONDS, longest))
        try:
            async with self._session.get(f"{engine.url}/health", timeout=timeout, allow_redirects=False) as response:
                if response.status == 401:
                    raise EngineError(f"{engine} obeys somebody else: it was started with another secret")
                return response.status == 200
        except TimeoutError:
            return None
        except BAD_HTTP:
            return False

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

# A kept connection that its server has just closed is found out when it is used: the second try opens a new one, and
# three outlast a moment without free ports. Who is gone for longer has ended, which the supervisor sees.
NUM_CONNECTION_RETRIES = 3
RETRY_SECONDS = 0.2  # doubled from try to try
# Whether an engine is ready is asked often, because training waits for it, and each time for long, because one that
# loads its model may not answer meanwhile.
PROBE_TIMEOUT_SECONDS = 10.0
PROBE_INTERVAL_SECONDS = 0.1
# SGLang answers as soon as it has computed one token more, whatever it is busy with. What takes longest is one batch.
SILENCE_SECONDS = 60.0
# A line that is too long is none of aiohttp's errors of clients.
BAD_HTTP = (aiohttp.ClientError, HttpProcessingError)


class EngineError(RuntimeError):
    """An engine does not answer, or not what it was asked for; names it."""


class NoAnswerError(EngineError):
    """An engine was not reached, or did not answer in time; another one may."""


@dataclass(frozen=True)
class Engine:
    """An engine, as errors name it."""

    number: int
    url: str

    def __str__(self) -> str:
        return f"engine {self.number} ({self.url})"


class EngineCalls:
    """An async context manager, open for as long as calls are made.

    Of an engine that was not started for the run subclasses lower `_max_answer_bytes`.

    Args:
        urls: Of the engines, "http://host:port".
        secret: What the engines want to be shown.
        request_timeout_seconds: Every answer must come within this.
    """

    # Of answers with tokens, log-probabilities and routes of many samples.
    _max_answer_bytes = 16 << 30

    def __init__(self, urls: Sequence[str], secret: str, request_timeout_seconds: float):
        assert urls, "a client needs at least one engine"
        self._engines = [Engine(number, url.rstrip("/")) for number, url in enumerate(urls)]
        self._timeout_seconds, self._headers = request_timeout_seconds, authorization(secret)
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0

    async def __aenter__(self) -> Self:
        # No connection is kept: the server drops an idle one after seconds, a training step takes longer, and
        # a weight update that meets a dropped connection must not be repeated.
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
        """How many engines there are."""
        return len(self._engines)

    async def call_all(
        self, method: str, path: str, body: dict[str, Any] | None = None, may_repeat: bool = False
    ) -> list[Any]:
        """Make one call to every engine at the same time; raise one error that names all that failed."""
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
            engine: Which one.
            method: Of HTTP.
            path: And query.
            body: JSON; None for none.
            may_repeat: It does no harm twice: it is tried again when the connection fails.

        Raises:
            EngineError: No answer in time, or another one than success.
        """
        num_tries = 1 + (NUM_CONNECTION_RETRIES if may_repeat else 0)
        for attempt in range(1, num_tries + 1):
            try:
                return await self._call_once(engine, method, path, body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if attempt == num_tries:
                    raise NoAnswerError(
                        f"{engine}: {method} {path}: no connection after {attempt} tries: {error}"
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
            raise NoAnswerError(f"{engine}: {method} {path}: no answer within {timeout.total:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            raise
        except (*BAD_HTTP, struct.error, *MALFORMED) as error:
            what = "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read"
            raise EngineError(f"{engine}: {method} {path}: the answer {what}: {error}") from error

    def _seconds_of(self, method: str) -> float:
        """Return within what time a request has to be answered."""
        return self._timeout_seconds

    @property
    def _silence_seconds(self) -> float:
        """Return how long an engine that has missed a deadline may be silent; no longer than for a request."""
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

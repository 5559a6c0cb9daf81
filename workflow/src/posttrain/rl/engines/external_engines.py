"""Client of external engines that must all serve one checkpoint; engines that do not answer are excluded.

An engine is admitted if it requires the secret, is of a known type, and serves the checkpoint, which it loads first if
necessary. An engine that fails to answer three times in a row, or answers with other weights, is excluded: its open
requests go to others. It is probed further, and is admitted again, with the same checks, when it answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from posttrain.rl.engines.calls import PROBE_INTERVAL_SECONDS, PROBE_TIMEOUT_SECONDS, Engine, EngineError, NoAnswerError
from posttrain.rl.engines.client import EngineClient, from_disk
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.store import read_receipt, receipt_of
from posttrain_weights.sglang_hooks import VERSION

log = logging.getLogger(__name__)

MOST_MISSES = 3
# Seconds between two probes of an engine.
LOOK_SECONDS = 1.0
# Hex digits of the receipt's digest (of 64) that form the weight version: a number that every engine can represent.
DIGITS = 15
# Keys of config.json that describe its writer, not the model.
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class ExternalEngines(EngineClient):
    """Client of external engines that serve one checkpoint; see the module docstring.

    Args:
        urls: Engine URLs.
        secret: Their shared secret.
        request_timeout_seconds: Every answer must arrive within this.
        checkpoint: Checkpoint in Hub layout, with its receipt; engines see it at the same path.
        vocab_size: See `EngineClient`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        request_timeout_seconds: float,
        checkpoint: Path,
        vocab_size: int | None = None,
    ):
        super().__init__(urls, secret, request_timeout_seconds, vocab_size=vocab_size)
        self._checkpoint = checkpoint
        self.weights = int(read_receipt(receipt_of(checkpoint)).digest[:DIGITS], 16)
        # Set while an engine is excluded; all are at first.
        self._left_out = [asyncio.Event() for _ in urls]
        self._watchers: list[asyncio.Task[None]] = []
        # How long a request waits for any engine.
        self._wait_seconds = 0.0

    async def __aenter__(self) -> Self:
        for event in self._left_out:
            event.set()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await super().__aexit__(kind, error, trace)

    async def wait_ready(
        self,
        timeout_seconds: float,
        check_processes: Callable[[], None] | None = None,
        tell_silent: Callable[[str], None] | None = None,
    ) -> None:
        """Admit all engines, and monitor them from now on; see `EngineClient.wait_ready`.

        Raises:
            RuntimeError: An engine is not ready in time or cannot be admitted; names the first.
        """
        await super().wait_ready(timeout_seconds, check_processes, tell_silent)
        await asyncio.gather(*(self._let_in(engine) for engine in self._engines))
        self._wait_seconds = timeout_seconds
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self._engines]

    async def generate(self, requests: Sequence[GenerateRequest], request_number: int) -> list[GenerateResult]:
        """Sample like `EngineClient.generate`, from the engine with that number among the admitted ones.

        Raises:
            EngineError: An engine refuses, or none is available within the start timeout.
        """
        while True:
            engine = await self._choose(request_number)
            left_out = asyncio.ensure_future(self._left_out[engine.number].wait())
            answer = asyncio.ensure_future(self._generate_on(engine, requests, request_number))
            try:
                await asyncio.wait([answer, left_out], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    results = answer.result()
                    if {result.weight_version for result in results} == {self.weights}:
                        return results
                    self._leave_out(engine, "it answers with other weights")
            except NoAnswerError as error:
                self._leave_out(engine, str(error))
            finally:
                left_out.cancel()
                answer.cancel()

    async def _choose(self, request_number: int) -> Engine:
        deadline = time.monotonic() + self._wait_seconds
        while not (there := [engine for engine in self._engines if not self._left_out[engine.number].is_set()]):
            if time.monotonic() > deadline:
                raise EngineError(f"none of {len(self._engines)} engines was there for {self._wait_seconds:g} s")
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        return there[request_number % len(there)]

    def _leave_out(self, engine: Engine, why: str) -> None:
        if not self._left_out[engine.number].is_set():
            log.warning("%s gets no more requests until it serves %s again: %s", engine, self._checkpoint, why)
            self._left_out[engine.number].set()

    async def _watch(self, engine: Engine) -> None:
        """Exclude an engine after repeated failures to answer, and admit it again when it answers."""
        misses = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if not await self._is_healthy(engine, PROBE_TIMEOUT_SECONDS):
                    misses += 1
                    if misses >= MOST_MISSES:
                        self._leave_out(engine, f"no answer {misses} times in a row")
                    continue
                if self._left_out[engine.number].is_set():
                    await self._let_in(engine)
                    log.warning("%s gets requests again", engine)
                misses = 0
            except EngineError as error:
                self._leave_out(engine, str(error))

    async def _let_in(self, engine: Engine) -> None:
        """Check an engine, and have it load the checkpoint if it does not serve it yet.

        Raises:
            EngineError: The engine is not admissible, or cannot load it.
        """
        await self._require_secret(engine)
        about = await self.call(engine, "GET", "/get_server_info", may_repeat=True)
        model = await self.call(engine, "GET", "/get_model_info", may_repeat=True)
        if why := _unlike(about, model, self._checkpoint):
            raise EngineError(f"{engine} cannot serve {self._checkpoint}: {why}")
        if str(model.get("weight_version")) != str(self.weights):
            log.info("%s loads %s", engine, self._checkpoint)
            body = from_disk(self.weights, self._checkpoint)
            await self.call(engine, "POST", "/update_weights_from_disk", body)
        self._left_out[engine.number].clear()

    async def _require_secret(self, engine: Engine) -> None:
        """Raise for an engine that requires no secret, because anybody could change its weights."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{engine.url}/get_model_info", allow_redirects=False) as response,
            ):
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(f"{engine} does not say whether it wants a secret: {error!r}") from error
        if status not in (401, 403):
            raise EngineError(f"{engine} answers whoever asks: start it with the secret that is given here")


def _unlike(about: dict[str, Any], model: dict[str, Any], checkpoint: Path) -> str:
    """Return why an engine cannot serve a checkpoint; empty if it can."""
    if about.get("engine") != "embedded" and about.get("version") != VERSION:
        return f"it is SGLang {about.get('version')}, and {VERSION} is what is tested"
    if about.get("disaggregation_mode", "null") not in (None, "null"):
        return f"it only does {about['disaggregation_mode']}"
    told = Path(str(model.get("model_path"))) / "config.json"
    try:
        own, other = (json.loads(path.read_text(encoding="utf-8")) for path in (checkpoint / "config.json", told))
    except (OSError, ValueError) as error:
        return f"its model cannot be compared: {error}"
    keys = sorted((own.keys() | other.keys()) - {*NOT_OF_THE_MODEL})
    if differing := [key for key in keys if own.get(key) != other.get(key)]:
        return f"its model {told.parent} differs in {', '.join(differing)}"
    return ""

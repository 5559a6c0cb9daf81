"""The one client of every engine: SGLang's HTTP API, over asyncio.

One client serves all engines of a run. Requests go to one engine, weights go to all. `generate` answers a batch whose
tokens all have the same weights; `sample` answers one request, during which weights may change (`pause`, `resume`). The
client guarantees:

- One `generate` call is one HTTP request to one engine, selected by the caller's request number. The caller
  chooses the composition of a batch, because it determines the last bits of the log-probabilities.
- Every call has a timeout. Only idempotent calls are retried, only after connection failures, and a limited
  number of times; each retry is logged and counted in `num_retries`.
- While a weight update is open, or after one failed, `generate` and `sample` refuse, because engines may hold different
  weights. The next complete update that succeeds enables them again. During a pause `sample` waits instead.
- A request never reuses a prefix cache entry of a weight version that was replaced before the request was sent.

Every error names the engine by number and URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.plan.sizing.phases import ENGINE_CACHE, ENGINE_WEIGHTS
from posttrain.rl.engines.calls import PROBE_INTERVAL_SECONDS, Engine, EngineError
from posttrain.rl.engines.commands import EngineCommands
from posttrain.rl.engines.in_flight import InFlight
from posttrain.rl.engines.prefill_pairs import PrefillPairs
from posttrain.rl.engines.responses import (
    GenerateRequest,
    GenerateResult,
    check_prompts,
    generate_body,
    of_first_weights,
    parse_generate_answer,
)
from posttrain.rl.engines.tensor_payload import NamedTensors, serialize_bucket

log = logging.getLogger(__name__)
# SGLang's names. CUDA graphs refer to the cache, so they are released with it.
TAGS = {ENGINE_WEIGHTS: ("weights",), ENGINE_CACHE: ("kv_cache", "cuda_graph")}
# Modes of a pause that hold running requests -> SGLang's name.
HOLDING_MODES = {"keep": "in_place", "recompute": "retract"}
ENDING_MODES = ("finish", "abort")
# A request that was on its way to the engine is aborted with the next try.
ABORT_INTERVAL_SECONDS = 0.1
ABORT_ALL: tuple[str, dict[str, Any]] = ("/abort_request", {"abort_all": True})


class EngineClient(EngineCommands):
    """Client of the engines of a run; an async context manager.

    Args:
        urls: Engine URLs, "http://host:port".
        secret: The engines' shared secret.
        request_timeout_seconds: Every answer must arrive within this.
        ranks_per_engine: World size of all engines, or of each; each rank takes its own copy of a weight bucket.
        vocab_size: Limit for prompt tokens. SGLang does not check it, and a token beyond it crashes the server. None
            skips the check.
        num_prefill: The last `num_prefill` engines only prefill and the others only decode; 0: all do both.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        request_timeout_seconds: float,
        ranks_per_engine: int | Sequence[int] = 1,
        vocab_size: int | None = None,
        num_prefill: int = 0,
    ):
        super().__init__(urls, secret, request_timeout_seconds)
        self._ranks_of = [ranks_per_engine] * len(urls) if isinstance(ranks_per_engine, int) else [*ranks_per_engine]
        self._vocab_size = vocab_size
        num_answering = len(urls) - num_prefill
        self._answering, self._prefilling = self._engines[:num_answering], self._engines[num_answering:]
        self._pairs = PrefillPairs(self, self._prefilling) if num_prefill else None
        # Why no request is sent; empty if all engines serve the same version.
        self._closed_because = ""
        self._update_is_open = False
        self._version, self._next_version = "", ""
        self._in_flight = InFlight(self._engines)
        self._is_held = self._keeps_cache = self._has_old_cache = False
        self._asleep: frozenset[str] = frozenset()

    # ---- tokens ----

    async def generate(self, requests: Sequence[GenerateRequest], request_number: int) -> list[GenerateResult]:
        """Sample one response per request, all in one HTTP request to one engine.

        Args:
            requests: One batch for the engine.
            request_number: Request n goes to engine n modulo the number of engines; with separate prefill, to one
                decode engine and one prefill engine, each by n modulo their number.

        Returns:
            One result per request, in order.

        Raises:
            ValueError: A prompt is empty or has a token outside the vocabulary.
            EngineError: The engine refuses, fails, aborts, or gives a malformed answer.
            RuntimeError: Weights are being updated.
        """
        self._require_serving()
        engine = self._answering[request_number % len(self._answering)]
        return await self._generate_on(engine, requests, request_number)

    async def sample(self, request: GenerateRequest, engine: int | None = None, waits: bool = True) -> GenerateResult:
        """Sample one response on the engine with the fewest requests; waits during a pause.

        Args:
            request: The request.
            engine: Number of the engine to ask if it has not failed, because its prefix cache has the prompt.
            waits: False for an evaluation, which is over before weights change: a pause holds back what trains.

        Returns:
            The response. Its tokens may have several versions; 0 is that of the initial weights. If a pause aborted it,
            it has the tokens so far, perhaps none; continue it with a request whose prompt includes them.

        Raises:
            ValueError: The prompt is empty or has a token outside the vocabulary.
            EngineError: An engine failed; names it. One that does not answer gets no more requests until `wait_ready`
                or the next update succeeds, so that another try goes to another engine.
            RuntimeError: A weight update has failed.
        """
        if waits:
            await self._in_flight.opened()
        self._require_serving()
        engines = [self._in_flight.least_busy(self._answering, engine)]
        if self._pairs:
            engines.append(self._in_flight.least_busy(self._prefilling))
        sent_to = self._version  # "" before the first update: the engines' initial weights have no version
        with self._in_flight.request(engines):
            number = self._prefilling.index(engines[1]) if self._pairs else 0
            (result,) = await self._generate_on(engines[0], [request], number, may_abort=True)
        if any(span.version is None for span in result.versions):
            if sent_to:
                self._in_flight.exclude(engines[0])
                raise EngineError(f"{engines[0]} was started again: it sampled with weights that were not published")
            result = of_first_weights(result)
        return dataclasses.replace(result, engine=engines[0].number)

    @contextlib.contextmanager
    def _one_engine(self) -> Iterator[Engine]:
        engine = self._in_flight.least_busy(self._answering)
        with self._in_flight.request([engine]):
            yield engine

    @property
    def num_in_flight(self) -> int:
        """Number of requests of `sample` that are being answered."""
        return self._in_flight.count

    @property
    def can_sample(self) -> bool:
        """Whether an engine is left that has not failed since the last update or `wait_ready`."""
        return self._in_flight.has_any(self._answering)

    def _require_serving(self) -> None:
        if why := self._closed_because or ", ".join(f"{part} asleep" for part in sorted(self._asleep)):
            raise RuntimeError(f"engines do not generate: {why}")

    async def _generate_on(
        self, engine: Engine, requests: Sequence[GenerateRequest], request_number: int, may_abort: bool = False
    ) -> list[GenerateResult]:
        check_prompts(requests, self._vocab_size)
        body = generate_body(requests, f"version {self._version}" if self._has_old_cache else "")
        if self._pairs:
            answer = await self._pairs.generate(engine, body, request_number)
        else:
            answer = await self.call(engine, "POST", "/generate", body, may_repeat=True)
        try:
            return parse_generate_answer(answer, requests, may_abort)
        except ValueError as error:
            raise EngineError(f"{engine}: /generate answered with {error}") from error

    # ---- state ----

    async def wait_ready(
        self,
        timeout_seconds: float,
        check_processes: Callable[[], None] | None = None,
        tell_silent: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until every engine is healthy.

        Args:
            timeout_seconds: Limit for all engines together.
            check_processes: Called between probes; raises if an engine's process has ended.
            tell_silent: Called with the address of an engine that accepts connections but never answered one. (A busy
                engine answers; a starting one refuses connections.)

        Raises:
            RuntimeError: An engine was not healthy in time or belongs to another run; names the first.
        """
        deadline = time.monotonic() + timeout_seconds
        for engine in self._engines:
            began, is_silent = time.monotonic(), tell_silent is not None
            while (is_healthy := await self._is_healthy(engine, deadline - time.monotonic())) is not True:
                is_silent &= is_healthy is None
                if is_silent and tell_silent and time.monotonic() - began >= self._silence_seconds:
                    log.warning("%s has not answered for %.0f s: it hangs", engine, time.monotonic() - began)
                    tell_silent(engine.url)
                    is_silent = False  # the process was replaced
                if check_processes:
                    check_processes()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{engine} is not ready after {timeout_seconds:g} s")
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        self._in_flight.forgive()

    # ---- pauses of `sample` ----

    async def pause(self, on_new_weights: str) -> None:
        """Hold new requests of `sample` back until `resume`, and stop the running ones, so that weights may change.

        Args:
            on_new_weights: What happens to running requests.
                "keep": they go on after the pause with the KV cache that they have;
                "recompute": they go on, and their KV cache is computed again with the new weights;
                "abort": they are answered with the tokens so far;
                "finish": they finish first.

        Raises:
            EngineError: An engine failed; names it. New requests still wait: pause again, or resume.
        """
        if on_new_weights not in (*HOLDING_MODES, *ENDING_MODES):
            raise ValueError(f"on_new_weights {on_new_weights!r}: {', '.join((*HOLDING_MODES, *ENDING_MODES))}")
        self._in_flight.close()
        if mode := HOLDING_MODES.get(on_new_weights):
            self._is_held, self._keeps_cache = True, on_new_weights == "keep"
            await self.pause_generation(mode)
            return
        if on_new_weights == "abort":
            await self._abort_in_flight()
        await self._in_flight.none()
        # An engine may still be ending a request whose caller has left.
        await self._tell_answering(f"/flush_cache?timeout={self._timeout_seconds:g}", {})

    async def _tell_answering(self, path: str, body: dict[str, Any]) -> None:
        """Call all engines but those that did not answer a request: these are replaced, and hold nothing then."""
        there = [engine for engine in self._engines if self._in_flight.has_any([engine])]
        await asyncio.gather(*(self.call(engine, "POST", path, body, may_repeat=True) for engine in there))

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            EngineError: An engine failed; names it. New requests still wait: resume again.
            RuntimeError: A weight update has failed, and running requests would mix weights.
        """
        self._require_serving()
        if self._is_held:
            await self.continue_generation()
        self._is_held = self._keeps_cache = False
        self._in_flight.open()

    async def _abort_in_flight(self) -> None:
        await self._tell_answering(*ABORT_ALL)
        while self.num_in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._in_flight.none(), ABORT_INTERVAL_SECONDS)
            await self._tell_answering(*ABORT_ALL)

    # ---- memory ----

    async def release_memory(self, parts: Iterable[str]) -> None:
        """Have engines release parts of their GPU memory once they are idle.

        Args:
            parts: Parts of `plan.sizing.phases` that are awake. Released weights are lost and need an update.

        Raises:
            RuntimeError: An engine did not become idle in time, or failed; names it.
        """
        if ENGINE_WEIGHTS in parts:
            self._closed_because = "they have given back their weights; update them first"
        if ENGINE_CACHE in parts:  # SGLang crashes if it is busy, even with aborted requests, so wait until it is idle
            await self.call_all("POST", f"/flush_cache?timeout={self._timeout_seconds:g}", {})
        await self.call_all("POST", "/release_memory_occupation", {"tags": _tags(parts)})
        self._asleep |= {*parts}

    async def resume_memory(self, parts: Iterable[str]) -> None:
        """Have engines allocate released parts of their GPU memory again."""
        await self.call_all("POST", "/resume_memory_occupation", {"tags": _tags(parts)})
        self._asleep -= {*parts}

    # ---- weights ----

    async def update_weights(self, version: int, buckets: Iterable[NamedTensors]) -> None:
        """Send new weights to all engines over HTTP, bucket by bucket.

        Args:
            version: The version that engines report with each response from now on.
            buckets: See `make_buckets`; prefetched by one.

        Raises:
            RuntimeError: Engines failed; names each. `generate` then refuses until a complete update succeeds.
        """
        await self.begin_update(version)
        waiting: NamedTensors | None = None
        for bucket in buckets:
            if waiting is not None:
                await self.send_bucket(waiting)
            waiting = bucket
        if waiting is None:
            raise RuntimeError(f"the update to weight version {version} has no tensors")
        await self.send_bucket(waiting, last_of_version=version)
        await self.end_update()

    async def begin_update(self, version: int) -> None:
        """Open an update, after closing one that an earlier attempt left open."""
        if self._update_is_open:
            await self._close_abandoned_update()
        self._closed_because = f"the update to weight version {version} is open or failed; update again from the start"
        self._update_is_open, self._next_version = True, str(version)
        await self.call_all("POST", "/begin_weight_update", {})

    async def send_bucket(self, bucket: NamedTensors, last_of_version: int | None = None) -> None:
        """Send one bucket to all engines.

        Args:
            bucket: Names and CPU tensors.
            last_of_version: The update's version, passed with its last bucket only.
        """
        assert self._update_is_open, "send_bucket outside begin_update and end_update"
        payload = await asyncio.to_thread(serialize_bucket, bucket)
        is_last = last_of_version is not None
        flushes = is_last and not self._keeps_cache
        body = {"flush_cache": flushes, "weight_version": str(last_of_version) if is_last else None}
        bodies = [{**body, "serialized_named_tensors": [payload] * ranks} for ranks in self._ranks_of]
        await self.call_each("POST", "/update_weights_from_tensor", bodies, may_repeat=False)

    async def end_update(self) -> None:
        """Close the update: engines serve the new weights, and generate again."""
        await self.call_all("POST", "/end_weight_update", {})
        self._update_is_open = False
        self._serves(self._next_version)

    def _serves(self, version: str) -> None:
        """Note a successful update."""
        self._closed_because, self._version = "", version
        self._has_old_cache |= self._keeps_cache
        self._in_flight.forgive()

    async def end_received(self, version: int) -> None:
        """Close an update whose tensors were not sent over HTTP."""
        if not self._keeps_cache:
            await self.call_all("POST", "/flush_cache", {})
        # By default SGLang aborts all requests at this call, unlike at its other updates.
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.call_all("POST", "/update_weight_version", body)
        await self.end_update()

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """Have all engines load a checkpoint folder from a shared file system.

        Raises:
            RuntimeError: Engines failed; names each. `generate` then refuses until an update succeeds.
        """
        if self._update_is_open:
            await self._close_abandoned_update()
        self._closed_because = f"the update to weight version {version} from {folder} is open or failed; update again"
        body = from_disk(version, folder) | {"flush_cache": not self._keeps_cache}
        await self.call_all("POST", "/update_weights_from_disk", body)
        self._serves(str(version))

    async def _close_abandoned_update(self) -> None:
        """Close an update that failed midway, so that the next can begin; its weights are never used."""
        for engine in self._engines:
            try:
                await self.call(engine, "POST", "/end_weight_update", {})
            except RuntimeError as error:
                log.warning("closing the failed weight update: %s", error)
        self._update_is_open = False


def from_disk(version: int, folder: Path) -> dict[str, Any]:
    """Return the request body for loading a checkpoint folder."""
    return {
        "model_path": str(folder.resolve()),
        # The default is the engine's start format, which may have been "dummy".
        "load_format": "auto",
        "weight_version": str(version),
        "flush_cache": True,
    }


def _tags(parts: Iterable[str]) -> list[str]:
    return [tag for part in sorted(parts) for tag in TAGS[part]]

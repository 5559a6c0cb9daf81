"""The thread that runs batches and decides when weights may change.

Requests come from the HTTP server's event loop and wait in one queue. In deterministic mode each request is its
own batch, so that the batch composition depends only on the client. Otherwise all requests that wait when a batch
ends are merged, up to `max_batch_rows`.

Weights change only while no batch runs, or while generation is paused between two tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.rl.engines.embedded.generation import Response, generate
from posttrain.rl.engines.embedded.requests import RequestError, Row

log = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "aborted by request"}


@dataclass
class Work:
    """The rows of one request.

    Args:
        rows: The rows to generate.
        on_step: Called in the worker's thread after every token with the request's responses.
        weight_version: Version of the weights that computed the last token; set before `done`.
        done: The responses, or the error that ended the batch.
    """

    rows: Sequence[Row]
    on_step: Callable[[Sequence[Response]], None] | None = None
    weight_version: str | None = None
    done: Future[list[Response]] = field(default_factory=Future)


@dataclass
class Counters:
    """The worker's counters since its start."""

    num_batches: int = 0
    num_responses: int = 0
    num_output_tokens: int = 0
    busy_seconds: float = 0.0


class Worker:
    """Runs batches one after the other.

    Args:
        model: A `transformers` causal language model.
        weight_version: Returns the version of the serving weights.
        merge_requests: Merge waiting requests into one batch; False: every request is its own batch.
        max_batch_rows: Rows of a merged batch; a single request may be larger.
        has_weights: Whether weights are loaded.
    """

    def __init__(
        self,
        model: Any,
        weight_version: Callable[[], str | None],
        merge_requests: bool,
        max_batch_rows: int,
        has_weights: Callable[[], bool] = lambda: True,
    ):
        self._model, self._weight_version, self._has_weights = model, weight_version, has_weights
        self._merge_requests, self._max_batch_rows = merge_requests, max_batch_rows
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._paused = self._stopping = self._running = self._waiting_between_tokens = False
        self._abort_all = self._drop_cache = False
        self._num_changes_waiting = 0
        self._asleep: set[str] = set()
        self._abort_ids: set[str] = set()
        self.counters = Counters()
        # A daemon thread: a running batch must not keep an ending process alive.
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """End the running batch after its current token, then the thread."""
        with self._changed:
            self._stopping, self._paused = True, False
            self._abort_everything()
            self._changed.notify_all()
        self._thread.join(timeout_seconds)

    def submit(self, work: Work) -> Future[list[Response]]:
        """Queue a request; its future holds the responses.

        Raises:
            RequestError: The engine is asleep, or awake without weights.
        """
        with self._changed:
            if self._asleep or not self._has_weights():
                raise RequestError(f"the engine sleeps ({', '.join(sorted(self._asleep)) or 'no weights yet'})")
            self._queue.append(work)
            self._changed.notify_all()
        return work.done

    def wait_without_cache(self, timeout_seconds: float) -> bool:
        """Wait until no request has a cache or may get one before generation resumes; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_no_cache, timeout_seconds)

    def fall_asleep(self, parts: set[str]) -> None:
        """Accept no more requests.

        Raises:
            RequestError: Requests are pending, or a part is already asleep.
        """
        with self._changed:
            if not self._is_idle:
                raise RequestError("memory is given back only while no request runs or waits")
            if asleep := parts & self._asleep:
                raise RequestError(f"asleep already: {', '.join(sorted(asleep))}")
            self._asleep |= parts

    def wake_up(self, parts: set[str]) -> None:
        """Accept requests again once no part is asleep.

        Raises:
            RequestError: A part is already awake.
        """
        with self._changed:
            if awake := parts - self._asleep:
                raise RequestError(f"awake already: {', '.join(sorted(awake))}")
            self._asleep -= parts

    @property
    def _is_idle(self) -> bool:
        return not self._running and not self._queue

    @property
    def _has_no_cache(self) -> bool:
        runs = self._running and not (self._drop_cache and self._waiting_between_tokens)
        return not runs and (self._paused or not self._queue)

    def pause(self, mode: str) -> None:
        """Pause generation at the next token.

        Args:
            mode: "in_place" holds the running batch; "retract" also drops its cache, which is computed again after the
                pause; "abort" ends every request with its tokens so far.
        """
        with self._changed:
            self._paused = True
            self._drop_cache |= mode == "retract" and self._running
            if mode == "abort":
                self._abort_everything()
            self._changed.notify_all()

    def resume(self) -> None:
        """Resume the paused batch and the queue."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self, request_id: str, everything: bool) -> None:
        """End a request, or all, with the tokens so far."""
        with self._changed:
            if everything:
                self._abort_everything()
            else:
                self._abort_ids.add(request_id)
            self._changed.notify_all()

    @contextmanager
    def weights_may_change(self) -> Iterator[None]:
        """Wait until no batch computes, and keep it so during the block; has priority over queued requests."""
        with self._changed:
            self._num_changes_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running or self._waiting_between_tokens)
                yield
            finally:
                self._num_changes_waiting -= 1
                self._changed.notify_all()

    def _abort_everything(self) -> None:
        self._abort_all = self._running
        while self._queue:
            work = self._queue.popleft()
            if work.done.set_running_or_notify_cancel():
                work.done.set_result([Response(row, finish_reason=ABORTED) for row in work.rows])

    def _run(self) -> None:
        while works := self._next_batch():
            started = time.perf_counter()
            error: Exception = RuntimeError("the engine's worker ended in the middle of a batch")
            answers: list[tuple[Work, list[Response]]] = []
            try:
                answers = self._run_batch(works)
            except (RuntimeError, ArithmeticError, ValueError, MemoryError) as raised:
                # The error concerns only this batch's requests; the next batch may succeed.
                log.exception("a batch of %d requests failed", len(works))
                error = raised
            finally:
                self.counters.busy_seconds += time.perf_counter() - started
                self._batch_ended(works, answers, error)

    def _next_batch(self) -> list[Work]:
        """Wait for requests and return those of the next batch; empty if the worker stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._may_start())
            if self._stopping:
                return []
            works: list[Work] = [self._queue.popleft()]
            while self._merge_requests and self._queue and self._fits(works, self._queue[0]):
                works.append(self._queue.popleft())
            self._running, self._drop_cache = True, False
            return works

    def _may_start(self) -> bool:
        return bool(self._queue) and not self._paused and not self._num_changes_waiting

    def _fits(self, works: Sequence[Work], another: Work) -> bool:
        return sum(len(work.rows) for work in works) + len(another.rows) <= self._max_batch_rows

    def _run_batch(self, works: Sequence[Work]) -> list[tuple[Work, list[Response]]]:
        works = [work for work in works if work.done.set_running_or_notify_cancel()]
        if not works:
            return []
        responses = generate(
            self._model,
            [row for work in works for row in work.rows],
            lambda now: self._after_step(works, now),
            self._weight_version,
        )
        self.counters.num_batches += 1
        self.counters.num_responses += len(responses)
        self.counters.num_output_tokens += sum(len(response.output_ids) for response in responses)
        version = self._weight_version()
        for work in works:
            work.weight_version = version
        return [(work, list(share)) for work, share in _shares(works, responses)]

    def _after_step(self, works: Sequence[Work], responses: list[Response]) -> bool:
        """Between two tokens: update streams, wait while paused, end aborted requests.

        Returns:
            Whether the batch's cache must be computed again.
        """
        for work, share in _shares(works, responses):
            if work.on_step:
                work.on_step(share)
        with self._changed:
            if self._paused and not self._abort_all:
                self._waiting_between_tokens = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._paused or self._abort_all)
                self._waiting_between_tokens = False
            for response in responses:
                if response.finish_reason is None and (self._abort_all or response.row.request_id in self._abort_ids):
                    response.finish_reason = ABORTED
            drop_cache, self._drop_cache = self._drop_cache, False
            return drop_cache

    def _batch_ended(
        self, works: Sequence[Work], answers: Sequence[tuple[Work, list[Response]]], error: Exception
    ) -> None:
        """Mark the worker idle, then answer the requests (with the error if there are no results), in this order, so
        that a client that has its answer finds the worker idle."""
        with self._changed:
            self._running = self._abort_all = False
            self._abort_ids -= {row.request_id for work in works for row in work.rows}
            self._changed.notify_all()
        for work, responses in answers:
            work.done.set_result(responses)
        for work in works:
            if not work.done.done():
                work.done.set_exception(error)


def _shares(works: Sequence[Work], responses: Sequence[Response]) -> Iterator[tuple[Work, Sequence[Response]]]:
    start = 0
    for work in works:
        yield work, responses[start : start + len(work.rows)]
        start += len(work.rows)

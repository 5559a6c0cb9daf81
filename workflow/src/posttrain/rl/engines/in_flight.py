"""The requests that engines are answering one by one, and the gate that holds new ones back during a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from posttrain.rl.engines.calls import Engine, EngineError, NoAnswerError


class InFlight:
    """Counts requests per engine, and remembers engines that failed.

    Every method runs in the event loop; the constructor may run anywhere.

    Args:
        engines: All engines.
    """

    def __init__(self, engines: Iterable[Engine]):
        self._counts = dict.fromkeys(engines, 0)
        self._failed: set[Engine] = set()
        self._opened, self._none = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._none.set()

    @property
    def count(self) -> int:
        """Number of requests that were sent and are not answered."""
        return sum(self._counts.values())

    def close(self) -> None:
        """Hold new requests back."""
        self._opened.clear()

    def open(self) -> None:
        """Let requests pass again."""
        self._opened.set()

    async def opened(self) -> None:
        """Wait until requests may pass."""
        while not self._opened.is_set():  # it may close again before a waiting task runs
            await self._opened.wait()

    async def none(self) -> None:
        """Wait until every request is answered."""
        while not self._none.is_set():
            await self._none.wait()

    def has_any(self, engines: Sequence[Engine]) -> bool:
        """Return whether one of these engines has not failed."""
        return not self._failed.issuperset(engines)

    def least_busy(self, engines: Sequence[Engine], preferred: int | None = None) -> Engine:
        """Return the engine with the fewest requests among those that have not failed.

        Args:
            engines: Those to choose from.
            preferred: Number of the engine to take if it has not failed.

        Raises:
            EngineError: All have failed.
        """
        there = [engine for engine in engines if engine not in self._failed]
        if not there:
            raise EngineError(f"no engine is left: {', '.join(map(str, engines))} failed")
        if known := [engine for engine in there if engine.number == preferred]:
            return known[0]
        return min(there, key=lambda engine: (self._counts[engine], engine.number))

    @contextmanager
    def request(self, engines: Sequence[Engine]) -> Iterator[None]:
        """Count one request to each engine; one that does not answer gets no more until `forgive`."""
        self._none.clear()
        for engine in engines:
            self._counts[engine] += 1
        try:
            yield
        except NoAnswerError as error:
            self.exclude(error.engine or engines[0])
            raise
        finally:
            for engine in engines:
                self._counts[engine] -= 1
            if not self.count:
                self._none.set()

    def exclude(self, engine: Engine) -> None:
        """Send an engine no more requests until `forgive`."""
        self._failed.add(engine)

    def forgive(self) -> None:
        """Consider all engines again."""
        self._failed.clear()

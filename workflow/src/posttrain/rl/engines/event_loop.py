"""The event loop of everything that talks to engines: `asyncio.Runner`, or a loop in a separate thread.

A loop in a thread keeps running while the trainer computes, so engines are busy and responses are graded and stored.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class EventLoop(Protocol):
    """What `asyncio.Runner` and `LoopThread` have in common."""

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """Run a coroutine to its end and return its result."""


class LoopThread:
    """An event loop in a thread; a context manager that cancels what still runs at its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon thread: a failed trainer must not wait for engines.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """Run a coroutine in the thread and wait for its result."""
        future = self.start(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted
            raise

    def start(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coro, self._loop)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

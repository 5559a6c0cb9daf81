"""Has SGLang finish the launched batch before an in-place pause, so that its tokens keep the weights' old version.

SGLang launches a batch before it reads the results of the one before. An in-place pause leaves the results of the last
one unread; they are read after the pause, and their tokens get the version of the weights that were loaded meanwhile.
Here they are read when the pause begins, which also waits for the GPU. The event loop still expects an entry in its
queue of results after the pause, so a batch without requests takes their place.

Written against SGLang 0.5.23: `Scheduler.pause_generation`, `event_loop_overlap`, in srt/managers/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Processed:
    """A batch of which nothing is left to read."""

    reqs: tuple[Any, ...] = ()


def finish_first(pause: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the results of launched batches, then pause."""
    if request.mode == "in_place":
        queue = scheduler.result_queue
        for _ in range(len(queue)):
            batch, result = queue.popleft()
            scheduler.process_batch_result(batch, result)
            queue.append((Processed(), result))
    return pause(scheduler, request, *args, **kwargs)


def skip_processed(process: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the results of a batch, unless that is done."""
    return None if isinstance(batch, Processed) else process(scheduler, batch, *args, **kwargs)

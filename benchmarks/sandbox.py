"""Claim: a trivial program in a fresh sandbox takes at most 2.5 times as long as Python alone.

Both run the same interpreter with the same options, which leave out `site`, and print one line. They alternate, and the
claim is the median of the ratios of pairs. The table also has Python as users start it, and programs side by side.

    python -m benchmarks.sandbox
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from operator import truediv

from benchmarks.claims import report, report_table, start

from posttrain.sandbox.program import Limits, Program
from posttrain.sandbox.python_root import find_python
from posttrain.sandbox.run import run

GOAL = 2.5
NUM_PAIRS, NUM_SIDE_BY_SIDE = 100, 200
SOURCE = "print(1)"
LIMITS = Limits()
Once = Callable[[], Awaitable[None]]


def main() -> None:
    """Measure pairs, then programs side by side."""
    asyncio.run(measure(NUM_PAIRS, NUM_SIDE_BY_SIDE))


def quick() -> None:
    """Measure a few."""
    asyncio.run(measure(2, 4))


async def measure(num_pairs: int, num_side_by_side: int) -> None:
    """Print the table and the claim."""
    ways: dict[str, Once] = {
        "Python without `site`": lambda: run_bare("-S", "-B", "-P"),
        "Python": run_bare,
        "a fresh sandbox": run_sandboxed,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(num_pairs + 1):
        for way, once in ways.items():
            taken = await seconds_of(once)
            # The first one lists the libraries of Python, once for each process.
            seconds[way] += [taken] if number else []
    bare, boxed = seconds["Python without `site`"], seconds["a fresh sandbox"]
    rows = [(way, *shown(of), f"{await rate(ways[way], num_side_by_side):.0f}") for way, of in seconds.items()]
    report_table(("a trivial program in", "median, ms", "best, ms", "a second, one at a time on each core"), rows)
    ratio = statistics.median(map(truediv, boxed, bare))
    report("a fresh sandbox over Python without `site`, median of pairs", ratio, GOAL)


def shown(seconds: list[float]) -> tuple[str, str]:
    """Return median and minimum in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * min(seconds):.1f}"


async def run_bare(*options: str) -> None:
    """Run the program in the sandbox's own interpreter, without a sandbox."""
    pipe = asyncio.subprocess.PIPE
    words = [find_python().python, *options, "-c", SOURCE]
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    output, _ = await process.communicate(b"")
    assert output == b"1\n"


async def run_sandboxed() -> None:
    """Run the program in a fresh sandbox."""
    assert (await run(Program(SOURCE), LIMITS)).stdout == b"1\n"


async def seconds_of(once: Once) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    await once()
    return time.perf_counter() - started


async def rate(once: Once, number: int) -> float:
    """Return calls per second, one at a time on each core."""
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            await once()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in os.sched_getaffinity(0)))
    return number / (time.perf_counter() - started)


if __name__ == "__main__":
    start(main, quick)

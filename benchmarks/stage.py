"""Two claims about copies on a node's own disk.

Staging with verification takes at most 1.2 times as long as `cp -r`, both synced, from a cold cache, interleaved.
Looking at a complete copy again, by sizes, times and the start of the machine, takes under a second per 100 files.

4 GB in files of 64 MB and three of 512 MB, two workers per core; 8 GB of disk are needed. Run as root, which may
drop caches, from the repository's root:

    python -m benchmarks.stage
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.claims import report, start

from posttrain.checkpoint.staging.node_local import StagedSource, stage
from posttrain.store import Receipt, record_files

SIZES = [64 << 20] * 40 + [512 << 20] * 3
TIME_GOAL, CHECK_GOAL, REPEATS = 1.2, 1.0, 5
CHUNK_BYTES = 16 << 20


def main() -> None:
    """Measure, print the table and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    compare(SIZES, parser.parse_args().repeats, drop_caches)


def quick() -> None:
    """Two files of 1 MB, once, with whatever the system has in memory."""
    compare([1 << 20] * 2, 1, lambda: None)


def compare(sizes: Sequence[int], repeats: int, forget: Callable[[], None]) -> None:
    """Measure, print the table and a line of JSON for each claim."""
    with tempfile.TemporaryDirectory(prefix="stage-") as folder:
        origin = make_origin(Path(folder) / "weights", sizes)
        seconds, check = measure(origin, Path(folder) / "node", repeats, forget)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for way, median in medians.items():
        print(f"{way:10} {median:7.2f} s {origin.receipt.size_bytes / median / 1e6:8.0f} MB/s")
    report("staging with verification, times cp -r", medians["stage"] / medians["cp -r"], TIME_GOAL)
    report("looking at a complete copy, seconds per 100 files", check * 100 / len(sizes), CHECK_GOAL)


def make_origin(folder: Path, sizes: Sequence[int]) -> StagedSource:
    """Write the files and return them with their receipt."""
    numbers = random.Random(0)
    folder.mkdir()
    for index, size in enumerate(sizes):
        with open(folder / f"{index:03d}.bin", "wb") as file:
            for start_byte in range(0, size, CHUNK_BYTES):
                file.write(numbers.randbytes(min(CHUNK_BYTES, size - start_byte)))
    return StagedSource(folder, Receipt("finalize_torch_dist", record_files(folder), {}, {}))


def measure(
    origin: StagedSource, node: Path, repeats: int, forget: Callable[[], None]
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each way, and the median seconds of a second look."""
    ways: dict[str, Callable[[], object]] = {
        "cp -r": lambda: copy_and_sync(origin.folder, node),
        "stage": lambda: stage([origin], node, workers=2 * (os.cpu_count() or 1)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    looks = []
    for _ in range(repeats):
        for way, work in ways.items():
            shutil.rmtree(node, ignore_errors=True)
            forget()
            seconds[way].append(timed(work))
        looks.append(timed(ways["stage"]))
    return seconds, statistics.median(looks)


def copy_and_sync(source: Path, node: Path) -> None:
    """Copy as a user would, and wait for the disk."""
    node.mkdir()
    subprocess.run(["cp", "-r", source, node], check=True)
    subprocess.run(["sync", "-f", node], check=True)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drop_caches() -> None:
    """Make the next reading come from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


if __name__ == "__main__":
    start(main, quick)

"""The claim about `posttrain plan`: GLM-5 on 16 nodes in under 2 s, on a machine that does nothing else.

python -m benchmarks.plan
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.claims import report, start

GOAL_SECONDS = 2.0
REPEATS = 5


def main() -> None:
    """Measure, one call more than counts, and print a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = [plan(folder) for _ in range(REPEATS + 1)][1:]
    report("seconds of `posttrain plan model=glm5 nodes=16`", statistics.median(seconds), GOAL_SECONDS)


def quick() -> None:
    """One call."""
    with tempfile.TemporaryDirectory() as folder:
        report("seconds of one `posttrain plan model=glm5 nodes=16`", plan(folder), GOAL_SECONDS)


def plan(folder: str) -> float:
    """Return the seconds of one plan."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "posttrain", "plan", "model=glm5", "nodes=16", "--directory", folder]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    start(main, quick)

"""Claims about an update's speed: the same rollout to the same updated weights, beside TRL and a plain loop.

Ours, TRL at its fastest, and a loop over transformers' model with samples sorted by length make updates in turn, each
in a process of its own with the same threads, precision and allocator; the others wait meanwhile. TRL's micro-batch
and checkpointing are what a round or two of each setting find fastest. Tokens are those of responses, not padding.
Run from the repository's root, on a machine that does nothing else:

    python -m benchmarks.trainer --model moe
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims import report, start
from benchmarks.trainer_sides import GROUP, LONGEST, MODELS, PROMPT_TOKENS, SIDES, Task, Update
from tests.support.tiny_checkpoint import make_random_checkpoint

from posttrain.plan.sizing.flops import sequence_flops

NUM_RESPONSES, THREADS = 16, 2
GOALS = {"mixed": {"trl": 2.0, "plain": 1.2}, "equal": {"trl": 1.0, "plain": 1.0}}
TOKENS_OF_A_ROW = 4096


def main() -> None:
    """Measure, print a table, and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="moe")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one-trl", action="store_true", help="TRL with 2 a micro-batch, without checkpointing")
    options = parser.parse_args()
    for name, lengths in {"mixed": mixed_lengths(), "equal": (384,) * NUM_RESPONSES}.items():
        sides = {side: Task(side, options.model, lengths, TOKENS_OF_A_ROW) for side in ("ours", "plain")}
        sides["trl"] = (
            Task("trl", options.model, lengths, 2) if options.one_trl else fastest_trl(options.model, lengths)
        )
        measured = alternate(sides, options.pairs)
        print_table(name, sides, measured)
        for side, goal in GOALS[name].items():
            pairs = zip(measured[side], measured["ours"], strict=True)
            ratio = statistics.median(theirs["seconds"] / ours["seconds"] for theirs, ours in pairs)
            report(f"{options.model}, {name} lengths: tokens per second over {side}'s", ratio, goal, at_least=True)


def quick() -> None:
    """Each side makes one update of a tiny model, in this process."""
    norms: dict[str, float | None] = {}
    lengths = (8, 12) * (GROUP // 2)
    for side in SIDES:
        task = Task(side, "tiny", lengths, GROUP if side == "trl" else TOKENS_OF_A_ROW)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "hf"
            tensors = make_random_checkpoint(source, MODELS["tiny"])
            SIDES[side](task, source, tensors, partial(once, norms, side))
    require_same_work(norms)
    report("sides that have made an update", len(norms), len(SIDES), at_least=True)


def once(norms: dict[str, float | None], side: str, update: Update) -> None:
    """Make one update, and note its gradient norm."""
    norms[side] = update()


def mixed_lengths() -> tuple[int, ...]:
    """Return log-normal lengths, as answers to mathematical problems have them, cut at the limit."""
    source = random.Random(11)
    return tuple(min(max(int(source.lognormvariate(5.4, 0.9)), 16), LONGEST) for _ in range(NUM_RESPONSES))


class Side:
    """A side's process."""

    def __init__(self, task: Task):
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        words = ["-W", "ignore", "-m", "benchmarks.trainer_sides", json.dumps(dataclasses.asdict(task))]
        self._process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def update(self) -> dict[str, Any]:
        """Make one update."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next line of JSON; what libraries print is none."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(('{"seconds', '"ready"')):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def fastest_trl(model: str, lengths: tuple[int, ...]) -> Task:
    """Return TRL's settings with the fastest update of two; hopeless ones get one."""
    seconds: dict[Task, float] = {}
    for task in [Task("trl", model, lengths, size, again) for size in (1, 2, 4, 8, 16) for again in (False, True)]:
        side = Side(task)
        seconds[task] = side.update()["seconds"]
        if seconds[task] < 2 * min(seconds.values()):
            seconds[task] = min(seconds[task], side.update()["seconds"])
        side.end()
        print(f"TRL, {task.micro_batch:2} a micro-batch, checkpointing {task.checkpointing}: {seconds[task]:.1f} s")
    return min(seconds, key=lambda task: seconds[task])


def alternate(tasks: dict[str, Task], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each side measured, in turns after one that is not counted."""
    sides = {name: Side(task) for name, task in tasks.items()}
    first = {name: side.update()["norm"] for name, side in sides.items()}
    require_same_work(first)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, side in sides.items():
            found[name].append(side.update())
    for side in sides.values():
        side.end()
    return found


def require_same_work(norms: Mapping[str, float | None]) -> None:
    """Fail unless the gradient norms of the first update agree; TRL tells none."""
    known = [norm for norm in norms.values() if norm is not None]
    assert math.isclose(min(known), max(known), rel_tol=0.01), f"the sides do different work: {norms}"


def print_table(name: str, tasks: dict[str, Task], measured: dict[str, list[dict[str, Any]]]) -> None:
    """Print seconds, tokens per second, and the share of the machine's products that the necessary work takes."""
    task = tasks["ours"]
    needed = sum(sequence_flops(MODELS[task.model], PROMPT_TOKENS + n).training(False) for n in task.lengths)
    rate = sgemm_rate()
    tokens = sum(task.lengths)
    print(f"\n{name} lengths: {tokens} tokens, {needed / 1e9:.0f} GFLOP; sgemm {rate / 1e9:.0f} GFLOP/s")
    for side, rounds in measured.items():
        seconds, cpu = (statistics.median(row[clock] for row in rounds) for clock in ("seconds", "cpu"))
        speed = f"{tokens / seconds:8.0f} tokens/s  {needed / seconds / rate:5.1%} of sgemm"
        settings = f"{tasks[side].micro_batch} a micro-batch, checkpointing {tasks[side].checkpointing}"
        print(f"{side:6} {seconds:7.2f} s  cores {cpu:7.2f} s {speed}  ({settings})")


def sgemm_rate() -> float:
    """Return the operations per second of a product of FP32 matrices, median of 5."""
    torch.set_num_threads(THREADS)
    a, b = torch.randn(2, 2048, 2048)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * 2048**3 / statistics.median(seconds[1:])


if __name__ == "__main__":
    start(main, quick)

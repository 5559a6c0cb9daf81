"""Claims about an update's speed and memory: the same rollout to the same updated weights, beside TRL and plain loops.

Each side makes updates in turn, in a process of its own with the same threads, precision and allocator; the others wait
meanwhile. The peers are three loops over transformers' model (padded, one sequence at a time, packed with attention
sequence by sequence) and TRL. TRL's micro-batch and checkpointing, the loops' experts and the token budget of padded
and packed micro-batches are what one or two updates of each setting find fastest. Ours has rows as long as the longest
sequence, as the loop that takes one at a time. Run from the repository's root:

    python -m benchmarks.trainer
    python -m benchmarks.trainer --models moe --lengths short --trl
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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claims import report, start
from benchmarks.trainer_sides import GROUP, LONGEST, LOOPS, MODELS, SIDES, Task, Update
from tests.support.tiny_checkpoint import make_random_checkpoint

THREADS = 2
TOKENS_OF_A_ROW = 4096
# Ratios of the fastest loop and of TRL to ours, and of our peak memory to that of the loop without padding.
FASTEST, MEAN, TRL, MEMORY = 1.0, 1.1, 2.5, 1.1


def lognormal_lengths(num_responses: int, mean: float, spread: float, longest: int, seed: int) -> tuple[int, ...]:
    """Return log-normal lengths, as answers to mathematical problems have them, cut at a limit."""
    source = random.Random(seed)
    return tuple(min(max(int(source.lognormvariate(mean, spread)), 16), longest) for _ in range(num_responses))


def mixed_lengths() -> tuple[int, ...]:
    """Return 16 lengths."""
    return lognormal_lengths(16, 5.4, 0.9, LONGEST, 11)


# Response tokens / longest: 1,224 / 361, 2,857 / 925, 5,161 / 1,336.
LENGTHS = {
    "short": lognormal_lengths(8, 4.9, 0.7, LONGEST, 0),
    "medium": lognormal_lengths(8, 5.7, 0.8, LONGEST, 0),
    "mixed": mixed_lengths(),
}
# The update of `make demo`: 128 samples of 28 prompt and 5 response tokens, on 4,352 tokens a row.
DEMO_LENGTHS, DEMO_PROMPT, DEMO_ROW = (5,) * 128, 28, 4352


def main() -> None:
    """Measure every cell, print a table of each, and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["moe", "moe16", "dense", "dense_wide"])
    parser.add_argument("--lengths", nargs="+", choices=sorted(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--trl", action="store_true", help="TRL, too, at its fastest of ten settings")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    ratios = []
    for model in options.models:
        for name in ["demo"] if model == "demo" else options.lengths:
            ratios.append(measure(f"{model}, {name}", cell(model, name, options.trl), options.rounds))
    if len(ratios) > 1:
        report(
            "geometric mean of the fastest loop's CPU seconds over ours", statistics.geometric_mean(ratios), MEAN, True
        )


def cell(model: str, name: str, with_trl: bool) -> dict[str, Task]:
    """Return the sides of one model and distribution of lengths, each with its fastest settings."""
    if model == "demo":
        ours = Task("ours", model, DEMO_LENGTHS, DEMO_ROW, prompt_tokens=DEMO_PROMPT)
        rows = [DEMO_ROW]
    else:
        longest = Task.prompt_tokens + max(LENGTHS[name])
        ours = Task("ours", model, LENGTHS[name], longest)
        rows = [longest, TOKENS_OF_A_ROW]
    kinds = ["grouped_mm", "eager"] if MODELS[model].n_routed_experts else ["eager"]
    tasks = {"ours": ours}
    for side in LOOPS:
        tried = [(row, kind) for row in (rows[:1] if side == "single" else rows) for kind in kinds]
        tasks[side] = fastest(replace(ours, side=side, micro_batch=row, experts=kind) for row, kind in tried)
    if with_trl:
        settings = [(size, again) for size in (1, 2, 4, 8, 16) for again in (False, True)]
        trl = replace(ours, side="trl", experts=kinds[0])
        tasks["trl"] = fastest(replace(trl, micro_batch=size, checkpointing=again) for size, again in settings)
    return tasks


def fastest(tasks: Iterable[Task]) -> Task:
    """Return the settings whose update takes the least CPU time, of two; hopeless ones get one."""
    seconds: dict[Task, float] = {}
    for task in tasks:
        side = Side(task)
        seconds[task] = side.update()["cpu"]
        if seconds[task] < 1.5 * min(seconds.values()):
            seconds[task] = min(seconds[task], side.update()["cpu"])
        side.end()
        print(f"tried {describe(task)}: {seconds[task]:.2f} s of CPU", flush=True)
    return min(seconds, key=lambda task: seconds[task])


def describe(task: Task) -> str:
    """Return a side's settings in words."""
    words = f"{task.side}, {task.micro_batch} {'samples' if task.side == 'trl' else 'tokens'} a micro-batch"
    if task.side != "ours" and MODELS[task.model].n_routed_experts:
        words += f", experts by {task.experts}"
    return words + (", checkpointing" if task.checkpointing else "")


class Side:
    """A side's process."""

    def __init__(self, task: Task):
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
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


def alternate(tasks: Mapping[str, Task], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
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
    """Fail unless the gradient norms of the first update agree; TRL gives none."""
    known = [norm for norm in norms.values() if norm is not None]
    assert math.isclose(min(known), max(known), rel_tol=0.01), f"the sides do different work: {norms}"


def measure(name: str, tasks: Mapping[str, Task], num_rounds: int) -> float:
    """Measure a cell, print its table and claims, and return the fastest loop's CPU seconds over ours."""
    measured = alternate(tasks, num_rounds)
    tokens = sum(tasks["ours"].lengths)
    print(f"\n{name} lengths: {len(tasks['ours'].lengths)} responses, {tokens} tokens")
    middle = {
        side: {key: statistics.median(row[key] for row in rows) for key in ("seconds", "cpu", "peak_mib")}
        for side, rows in measured.items()
    }
    for side, values in middle.items():
        speed = f"{values['seconds']:7.2f} s, CPU {values['cpu']:7.2f} s, {tokens / values['cpu']:7.0f} tokens/CPU s"
        print(f"{side:7} {speed}, peak {values['peak_mib']:6.0f} MiB  ({describe(tasks[side])})", flush=True)
    loops = {clock: min(middle[side][clock] for side in LOOPS) for clock in ("cpu", "seconds")}
    ratios = {clock: theirs / middle["ours"][clock] for clock, theirs in loops.items()}
    report(f"{name}: the fastest loop's CPU seconds over ours", ratios["cpu"], FASTEST, at_least=True)
    report(f"{name}: the fastest loop's wall seconds over ours", ratios["seconds"], FASTEST, at_least=True)
    memory = middle["ours"]["peak_mib"] / middle["single"]["peak_mib"]
    report(f"{name}: peak memory over that of one sequence at a time", memory, MEMORY)
    if "trl" in middle:
        report(f"{name}: TRL's CPU seconds over ours", middle["trl"]["cpu"] / middle["ours"]["cpu"], TRL, at_least=True)
    return ratios["cpu"]


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


if __name__ == "__main__":
    start(main, quick)

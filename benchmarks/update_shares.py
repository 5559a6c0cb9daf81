"""Where the time of an update goes: attention, choice of keys, the system's kernel.

One update of the model with experts that `benchmarks.trainer` measures, on its responses of mixed lengths, under
torch's profiler. Shares are of the seconds that cores computed, so other work on the machine changes them little. Run
from the repository's root:

    python -m benchmarks.update_shares
"""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims import report, start
from benchmarks.trainer import TOKENS_OF_A_ROW, mixed_lengths
from benchmarks.trainer_sides import GROUP, MODELS, Task, Update, serve_ours
from tests.support.tiny_checkpoint import make_random_checkpoint
from torch.profiler import ProfilerActivity, profile, record_function

from posttrain.rl.megatron_backend import packed
from posttrain.rl.megatron_backend.glm5 import choice

ATTENTION, CHOICE = "scaled_dot_product", "choice of keys"
# Attention and choice of keys were two thirds of an update, its kernel time as long as its arithmetic, and blocks had
# 1.3 to 2.8 times the scores of their sequences.
GOALS = {ATTENTION: 0.5, CHOICE: 0.25, "kernel": 0.25, "scores": 1.1}


def main() -> None:
    """Measure, and print a line of JSON for each claim."""
    measure("moe", mixed_lengths())


def quick() -> None:
    """The same on a tiny model and short responses."""
    measure("tiny", (8, 12) * (GROUP // 2))


def measure(model: str, lengths: tuple[int, ...]) -> None:
    """Measure, and print a line of JSON for each claim."""
    choosing = choice.select_topk, choice.index_scores
    choice.select_topk = _named(choice.select_topk)
    choice.index_scores = _named(choice.index_scores)
    task = Task("ours", model, lengths, TOKENS_OF_A_ROW)
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "hf"
            tensors = make_random_checkpoint(source, MODELS[model])
            serve_ours(task, source, tensors, lambda update: _measure(update, lengths))
    finally:
        choice.select_topk, choice.index_scores = choosing


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any) -> Any:
        with record_function(CHOICE):
            return function(*arguments)

    return named


def _measure(update: Update, lengths: tuple[int, ...]) -> None:
    for _ in range(2):
        update()
    before = resource.getrusage(resource.RUSAGE_SELF)
    update()
    after = resource.getrusage(resource.RUSAGE_SELF)
    system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    faults = after.ru_minflt - before.ru_minflt
    print(json.dumps({"kernel_seconds": system, "user_seconds": user, "page_faults": faults}))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update()
    rows = profiled.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    share = lambda word: sum(row.cpu_time_total for row in rows if row.key == word) / total  # noqa: E731
    attention = sum(row.self_cpu_time_total for row in rows if ATTENTION in row.key) / total
    report("attention's share of an update", attention, GOALS[ATTENTION])
    report("share of choosing its keys", share(CHOICE), GOALS[CHOICE])
    report("the kernel's share", system / (system + user), GOALS["kernel"])
    report("scores of all blocks over those of all sequences", _scores_of_blocks(lengths), GOALS["scores"])


def _scores_of_blocks(lengths: tuple[int, ...]) -> float:
    """Return the squares of blocks over those of their sequences, of a row of all samples."""
    samples = [Task.prompt_tokens + length for length in lengths]
    blocks = packed._blocks(samples)
    return sum(len(block) * samples[block[0]] ** 2 for block in blocks) / sum(length**2 for length in samples)


if __name__ == "__main__":
    start(main, quick)

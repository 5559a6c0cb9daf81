"""Trainings of two ranks that are killed again and again, in every phase of a step, until they are through.

The ranks are the product's own (`cluster.trainer_rank`), on rollouts that are on disk already, so that no engine is
asked. They are forked off one process that has imported everything: a kill costs a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from tests.support.megatron_single import fork_ranks, test_config
from tests.support.tiny_checkpoint import make_random_checkpoint

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.config.load import Resolved, dump_resolved
from posttrain.config.schema import Architecture
from posttrain.report.metrics import without_timings
from posttrain.report.rank_progress import PROGRESS_VARIABLE, read_progress
from posttrain.report.sinks import read_rows
from posttrain.rl.rollout.rollout_store import RolloutStore

# What a rank says of itself; nothing before its first step, while it joins the other and loads its state.
START = "start"
KINDS = (START, "rollout", "save", "old_logprobs", "mismatch", "train", "weight_sync", "begin_save")
# Two updates in each step.
NUM_STEPS, NUM_GROUPS, GROUP_SIZE, BATCH = 5, 4, 3, 6
POLL_SECONDS = 0.0005
# Longer than the shortest phases, so that kills also hit what follows.
MOST_DELAY_SECONDS = 0.02


def prepare(folder: Path, arch: Architecture, parallel: dict[str, int]) -> None:
    """Put into a folder what a training begins with: configuration, weights, the rollouts of all steps."""
    from tests.support.folders_in_parts import make_folder
    from tests.support.megatron_layouts import make_groups

    from posttrain.checkpoint.formats.torch_dist import Conversion

    config = test_config(arch, **parallel)
    config = dataclasses.replace(
        config,
        hardware=dataclasses.replace(config.hardware, gpus_per_node=2),
        training=dataclasses.replace(config.training, num_steps=NUM_STEPS, global_batch_size=BATCH),
        rollout=dataclasses.replace(config.rollout, rollout_batch_size=NUM_GROUPS, num_samples_per_prompt=GROUP_SIZE),
        trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=96, save_interval=1, mismatch_interval=1),
        logging=dataclasses.replace(config.logging, wandb=False, keep_rollouts=True),
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_resolved(Resolved(config, {}, "run")))
    make_random_checkpoint(folder / "hf", arch, seed=2)
    make_folder(Conversion(folder / "hf", "s1", arch), folder / "torch_dist")
    store = RolloutStore(folder / "rollouts")
    for step in range(NUM_STEPS):
        store.write(step, 0, make_groups(arch.vocab_size, NUM_GROUPS, GROUP_SIZE, seed=step))


def main() -> None:
    """Train in each folder undisturbed, then with so many kills, and compare; prints a JSON row for each."""
    request = json.loads(sys.argv[1])
    rng, aimed = random.Random(request["seed"]), Counter()

    for folder in map(Path, request["folders"]):
        begun = time.monotonic()
        begin(folder, "calm")
        _, start_seconds = attempt(folder, "calm")
        begin(folder, "killed")
        kills: list[tuple[str, float]] = []
        while len(kills) < request["kills"]:
            kind = min(KINDS, key=lambda kind: (aimed[kind], rng.random()))
            aimed[kind] += 1
            phase, seconds = attempt(folder, "killed", kind, rng, start_seconds)
            if not phase:
                begin(folder, "killed")  # it came to its end before that phase
                continue
            kills.append((phase, seconds))
        attempt(folder, "killed")
        row = {"folder": str(folder), "kills": kills, "differences": differences(folder)}
        print(json.dumps(row | {"seconds": time.monotonic() - begun}), flush=True)


def begin(folder: Path, run: str) -> None:
    """Compare what the run before has come to, and make an empty one."""
    if (folder / run).exists():
        assert differences(folder) == []
        (folder / run).rename(folder / f"{run}{time.monotonic_ns()}")
    (folder / run).mkdir()
    (folder / run / "rollouts").symlink_to(folder / "rollouts")


def attempt(
    folder: Path, run: str, kind: str = "", rng: random.Random | None = None, start_seconds: float = 0.0
) -> tuple[str, float]:
    """Run both ranks to the end, or kill them in a phase.

    Returns:
        The phase in which they were killed, or nothing, and after how many seconds; at the end, those before the first
        step.
    """
    name, begun, first = f"{run}-{time.monotonic_ns()}", time.monotonic(), 0.0
    progress = folder / f"{name}.progress"
    ranks = fork_ranks(2, folder / f"{name}.meeting", partial(train, folder, run, progress))
    delay = rng.choice((0.0, rng.uniform(0, MOST_DELAY_SECONDS))) if rng else 0.0
    moment = rng.uniform(0, start_seconds) if rng else 0.0
    step = newest_step(folder / run) + (rng.randrange(2) if rng else 0)
    endings: dict[int, int] = {}
    while len(endings) < len(ranks):
        time.sleep(POLL_SECONDS)
        for rank in ranks:
            if rank not in endings and (status := os.waitpid(rank, os.WNOHANG))[0]:
                endings[rank] = os.waitstatus_to_exitcode(status[1])
        seen, seconds = read_progress(progress), time.monotonic() - begun
        first = first or (seconds if seen else 0.0)
        is_there = seconds >= moment if kind == START else seen and seen.phase == kind and seen.step >= step
        if rng and is_there and not endings:
            time.sleep(delay)
            for rank in rng.sample(ranks, len(ranks)):
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
            last = read_progress(progress)
            return (last.phase if last else START), time.monotonic() - begun
        assert not any(endings.values()), f"{folder}: a rank ended with {endings}"
    return "", first


def train(folder: Path, run: str, progress: Path) -> None:
    """Be one rank."""
    from posttrain.cluster import trainer_rank

    if os.environ["RANK"] == "0":
        os.environ[PROGRESS_VARIABLE] = str(progress)
    arguments = {
        "--config": folder / "config.yaml",
        "--run-name": run,
        "--run-folder": folder / run,
        "--torch-dist": folder / "torch_dist",
        "--model-folder": folder / "hf",
        "--dataset": folder,
    }
    sys.argv = ["trainer_rank", *(str(word) for pair in arguments.items() for word in pair)]
    trainer_rank.main()


def newest_step(run: Path) -> int:
    """Return the finished steps of the newest checkpoint."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_??????")), default=0)


def differences(folder: Path) -> list[str]:
    """Return what the killed training has other than the undisturbed one: metrics, weights, optimizer's state."""
    rows = [[without_timings(row) for row in read_rows(folder / run / "metrics.jsonl")] for run in ("calm", "killed")]
    assert len(rows[0]) == NUM_STEPS
    last = f"checkpoints/step_{NUM_STEPS:06d}"
    calm, killed = (TorchDistReader(folder / run / last) for run in ("calm", "killed"))
    assert calm.keys == killed.keys
    assert any("exp_avg_sq" in key for key in calm.keys)
    differing = [key for key in calm.keys if not torch.equal(calm.read(key), killed.read(key))]
    return differing if rows[0] == rows[1] else ["metrics", *differing]


if __name__ == "__main__":
    main()

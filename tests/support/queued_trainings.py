"""Trainings whose engines run ahead: one rank of the product, with real engines on the CPU.

The engines are processes of their own, which outlive the kills of a rank.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.folders_in_parts import make_folder
from tests.support.forked_programs import ONE_THREAD, ForkedProgram
from tests.support.megatron_single import CONFIG_DIR
from tests.support.tiny_checkpoint import make_random_checkpoint

from posttrain.checkpoint.formats.torch_dist import Conversion
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.cluster.rendezvous import FILE_VARIABLE
from posttrain.config.engine import SECRET_VARIABLE
from posttrain.config.load import Resolved, dump_resolved, load_resolved
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.report.rank_progress import PROGRESS_VARIABLE
from posttrain.report.sinks import read_rows
from posttrain.rl.data.dataset_files import make_dataset
from posttrain.rl.engines.process import EngineProcess, running_engines
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import TrajectoryGroup

TRAINER = "posttrain.cluster.trainer_rank"
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 6, 4, 4
SETTINGS = {
    "training.num_steps": NUM_STEPS,
    "training.global_batch_size": NUM_GROUPS * GROUP_SIZE,
    "rollout.rollout_batch_size": NUM_GROUPS,
    "rollout.num_samples_per_prompt": GROUP_SIZE,
    "data.num_train_prompts": 64,
    "data.num_heldout_prompts": 16,
    "trainer.save_interval": 2,
    "trainer.num_threads": 1,
    "engine.num_threads": 1,
    "trainer.mismatch_interval": 2,
    "logging.wandb": "false",
    "logging.keep_rollouts": "true",
}
AHEAD = {"rollout.max_staleness": 1, "algorithm.preset": "tis"}


def prepare(folder: Path, **settings: object) -> Config:
    """Put into a folder what a training begins with; returns its configuration.

    Args:
        folder: Does not exist.
        settings: Keys of the configuration, with "__" for ".".
    """
    given = SETTINGS | AHEAD | {name.replace("__", "."): value for name, value in settings.items()}
    words = " ".join(f"{key}={value}" for key, value in given.items())
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG_DIR).config
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, wandb=False))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_resolved(Resolved(config, {}, "run")))
    make_random_checkpoint(folder / "hf", config.model.architecture, seed=2)
    make_tokenizer(config.model.architecture.max_position_embeddings).save_pretrained(folder / "hf")
    make_folder(Conversion(folder / "hf", "s1", config.model.architecture), folder / "torch_dist")
    (folder / "data").mkdir()
    make_dataset(config.data, folder / "data", folder / "manifest.json")
    return config


@contextmanager
def engines_of(folder: Path) -> Iterator[list[EngineProcess]]:
    """Start the engines of a training."""
    config = load_resolved(folder / "config.yaml")
    with running_engines(config, folder / "hf", folder / "logs", merge_requests=True) as engines:
        yield engines


def start(folder: Path, run: str, engines: Sequence[EngineProcess]) -> ForkedProgram:
    """Start a rank that trains."""
    (rank,) = start_ranks(folder, run, [engine.url for engine in engines], engines[0].secret)
    return rank


def start_ranks(
    folder: Path, run: str, urls: Sequence[str], secret: str = "", count: int = 1, progress: Path | None = None
) -> list[ForkedProgram]:
    """Start all ranks of a training; without engines it trains on the groups that are on disk.

    The working folder of the ranks, and so of what they start, is the run's. The first rank says in `progress` where it
    is.
    """
    (folder / run).mkdir(exist_ok=True)
    arguments = [
        ("--config", folder / "config.yaml"),
        ("--run-name", run),
        ("--run-folder", folder / run),
        ("--torch-dist", folder / "torch_dist"),
        ("--model-folder", folder / "hf"),
        ("--dataset", folder / "data"),
        *(("--engine", url) for url in urls),
    ]
    words = [str(word) for pair in arguments for word in pair]
    place = {"WORLD_SIZE": str(count), FILE_VARIABLE: str(folder / f"{time.monotonic_ns()}"), SECRET_VARIABLE: secret}
    environments = [
        {**os.environ, **ONE_THREAD, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
    ]
    if progress:
        environments[0][PROGRESS_VARIABLE] = str(progress)
    return [ForkedProgram(TRAINER, words, environment, folder / run) for environment in environments]


def finish(rank: ForkedProgram) -> None:
    """Wait for a rank to train to the end."""
    output, _ = rank.communicate(timeout=300)
    assert rank.returncode == 0, f"the trainer ended with {rank.returncode}:\n{output[-6000:]}"


def kill(rank: ForkedProgram) -> None:
    """Kill a rank at once and wait until it is gone."""
    rank.kill()
    rank.communicate(timeout=60)


def rows_of(folder: Path, run: str) -> list[dict[str, float]]:
    """Return the metrics of a run's steps."""
    return read_rows(folder / run / "metrics.jsonl")


def trained(folder: Path, run: str) -> list[list[TrajectoryGroup]]:
    """Return the groups of each step of a run."""
    store = QueueStore(folder / run / "rollouts")
    return [store.read_step(step, NUM_GROUPS) for step in range(len(rows_of(folder, run)))]

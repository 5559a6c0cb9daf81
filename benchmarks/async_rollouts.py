"""Training with engines that run ahead, beside synchronous steps, on the wall clock.

    python -m benchmarks.async_rollouts

An engine in a process of its own takes a fixed time for each token, however many requests it has; lengths are
log-normal (sigma 1, at most 8 medians). An update takes a fixed time, too. Both sleep. All else is the product's:
coordinator or generator and queue, engine client, graders, files, publisher and training loop. With a staleness of k,
k + 1 rollouts run at a time, so the gain is at most k + 1, and at most a synchronous step over an update.

With `rollout.tail_fraction` the trainer and the engine take turns, and the next step finishes the slowest groups. A
synchronous step's tail is the time between the 90th percentile of its responses and the last one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.claims import report, report_table, start
from benchmarks.scripted_engine import SECRET

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.derived import is_off_policy, runs_ahead, uses_queue
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop, LoopThread
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.coordinator import RolloutCoordinator
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.rl.rollout.source import QueueSource, SharedSource
from posttrain.rl.training.loop import train
from posttrain.rl.training.run import TrainingRun
from posttrain.rl.weight_sync.engine_layout import EngineShards
from posttrain.rl.weight_sync.publish import WeightPublisher
from posttrain.types import Prompt, RolloutResult

CONFIG_DIR = Path(__file__).parents[1] / "config"
GROUPS, SAMPLES, MEDIAN_TOKENS, MOST_MEDIANS = 8, 8, 24, 8
STALENESS = "rollout.max_staleness"
# Staleness -> goal over synchronous steps, by the update's time as a share of the rollout's.
GOALS = {1.0: {1: 1.8, 4: 1.9}, 0.5: {1: 1.7, 4: 2.5}}
# Groups left to the next step -> goal for the share of the tail that is saved, if there is one.
TAILS = {0.25: 0.0, 0.5: 0.0, 1.0: 0.7}
TURNS = "engine.sleep=always rollout.on_new_weights=abort"
QUICK_TOKEN_SECONDS = 0.0005
# Steps before the queue is full, which are not timed.
WARM_UP = 5


@dataclass(frozen=True)
class Timed:
    """One training.

    Args:
        seconds_per_step: Wall clock of a step, after the warm-up.
        longest_tokens: Of a step's longest response, mean over the timed steps.
        tail_tokens: Of that, those after nine tenths of the responses, mean.
        staleness: Age of a token in updates -> share.
        num_trained: Tokens trained on.
        num_generated: Tokens of all responses that the engine began.
    """

    seconds_per_step: float
    longest_tokens: float
    tail_tokens: float
    staleness: dict[int, float]
    num_trained: int
    num_generated: int


class ScriptedRun(TrainingRun):
    """A run whose update sleeps; it keeps when each step ended and what it trained on."""

    update_seconds = 0.0

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.ended: list[float] = []
        self.rollouts: list[RolloutResult] = []

    def reseed(self, step: int) -> None:
        """Do without random numbers."""

    def make_updates(self, groups: Sequence[Any]) -> list[Any]:
        """Do without micro-batches."""
        return []

    def with_old_logprobs(self, step: int, updates: Sequence[Any]) -> list[Any]:
        """Do without log-probabilities."""
        return []

    def train_on(self, *_: Any) -> tuple[list[Any], None]:
        """Take the time of an update."""
        time.sleep(self.update_seconds)
        return [], None

    def checkpoint_is_due(self, finished: int) -> bool:
        """Save nothing."""
        return False

    def canary_of(self, finished: int, rollout: RolloutResult) -> None:
        """Keep nothing."""

    def log_step(self, step: int, rollout: RolloutResult, *_: Any) -> dict[str, float]:
        """Note the time and the groups."""
        self.ended.append(time.perf_counter())
        self.rollouts.append(rollout)
        return {}


class NoState:
    """The checkpoints of a run that saves none."""

    def restore(self) -> int:
        """Begin."""
        return 0

    def finish_save(self, clock: Any) -> None:
        """Wait for nothing."""

    def remove_leftovers(self) -> None:
        """Leave nothing behind."""


class OneTensor:
    """The served values of a model with one tensor."""

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield it."""
        yield "model.norm.weight", torch.zeros(8)


def main() -> None:
    """Measure both lengths of an update, each synchronous and at two bounds of staleness."""
    _measure(num_steps=25, token_seconds=0.008, goals=GOALS, tails=TAILS)


def quick() -> None:
    """Run the same code for seconds."""
    _measure(num_steps=WARM_UP + 2, token_seconds=QUICK_TOKEN_SECONDS, goals={1.0: {1: 1.8}}, tails={0.5: 0.0})


@contextmanager
def _quiet() -> Iterator[None]:
    """Show errors only."""
    logger = logging.getLogger("posttrain")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@_quiet()
def _measure(
    num_steps: int, token_seconds: float, goals: dict[float, dict[int, float]], tails: dict[float, float]
) -> None:
    # The rollouts of the synchronous steps, whose lengths follow from their seeds.
    rollout_seconds = _train(num_steps, QUICK_TOKEN_SECONDS, 0.0, f"{STALENESS}=0").longest_tokens * token_seconds
    rows = []
    for share, of_share in goals.items():
        update_seconds = share * rollout_seconds
        timed = {k: _train(num_steps, token_seconds, update_seconds, f"{STALENESS}={k}") for k in (0, *of_share)}
        for k, one in timed.items():
            ratio = timed[0].seconds_per_step / one.seconds_per_step
            both = timed[0].longest_tokens * token_seconds + update_seconds
            bound = min(k + 1, both / update_seconds)
            ages = ", ".join(f"{age}: {part:.0%}" for age, part in one.staleness.items())
            row = (share, k, f"{one.seconds_per_step:.2f}", f"{ratio:.2f}", f"{bound:.2f}", one.num_trained)
            rows.append((*row, one.num_generated, ages))
            if k:
                report(f"update {share:g} of a rollout, staleness {k}", ratio, of_share[k], at_least=True)
    columns = ("update / rollout", "max_staleness", "s a step", "over synchronous", "bound")
    report_table((*columns, "tokens trained on", "generated", "tokens by age in updates"), rows)
    _measure_tails(num_steps, token_seconds, rollout_seconds, tails)


def _measure_tails(num_steps: int, token_seconds: float, update_seconds: float, goals: dict[float, float]) -> None:
    whole, rows = _train(num_steps, token_seconds, update_seconds, f"{STALENESS}=0"), []
    for fraction, goal in goals.items():
        words = f"{TURNS} {STALENESS}=2 rollout.tail_fraction={fraction}"
        cut = _train(num_steps, token_seconds, update_seconds, words)
        saved, tail = whole.seconds_per_step - cut.seconds_per_step, whole.tail_tokens * token_seconds
        times = (whole.seconds_per_step, cut.seconds_per_step, tail)
        ages = ", ".join(f"{age}: {part:.0%}" for age, part in cut.staleness.items())
        rows.append((fraction, *(f"{seconds:.2f}" for seconds in times), f"{saved / tail:.0%}", ages))
        if goal:
            report(f"tail saved with tail_fraction={fraction:g}", saved / tail, goal, at_least=True)
    report_table(
        ("tail_fraction", "s a step, synchronous", "s a step", "tail", "of it saved", "tokens by age in updates"), rows
    )


def _train(num_steps: int, token_seconds: float, update_seconds: float, asked: str) -> Timed:
    words = {
        "rollout.rollout_batch_size": GROUPS,
        "rollout.num_samples_per_prompt": SAMPLES,
        "rollout.max_response_tokens": MEDIAN_TOKENS * MOST_MEDIANS,
        "training.global_batch_size": GROUPS * SAMPLES,
        "training.num_steps": num_steps,
        "algorithm.preset": "tis",
        "rollout.fp8": "false",
        "trainer.max_tokens_per_gpu": 4096,
    }
    settings = " ".join([*(f"{key}={value}" for key, value in words.items()), asked])
    config = resolve({"model": "tiny", "site": "local", "set": settings}, CONFIG_DIR).config
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        run, url = _open(config, folder, token_seconds, stack)
        run.update_seconds = update_seconds
        train(run)
        with urllib.request.urlopen(f"{url}/lengths") as answer:
            generated = Counter[int](json.load(answer))
    return _timed(run, generated)


def _open(config: Config, folder: Path, token_seconds: float, stack: ExitStack) -> tuple[ScriptedRun, str]:
    """Return a run of the product's parts, its policy and checkpoints left out, and the engine's address."""
    (port,) = choose_free_ports(1)
    arguments = [str(argument) for argument in (port, token_seconds, MEDIAN_TOKENS, MOST_MEDIANS)]
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.scripted_engine", *arguments])
    stack.callback(engine.wait)
    stack.callback(engine.kill)
    is_ahead = runs_ahead(config)
    runner: EventLoop = (
        stack.enter_context(LoopThread()) if is_off_policy(config) else stack.enter_context(asyncio.Runner())
    )
    url = f"http://127.0.0.1:{port}"
    client = EngineClient([url], SECRET, 120.0)
    runner.run(client.__aenter__())
    stack.callback(lambda: runner.run(client.__aexit__(None, None, None)))
    make_tokenizer(config.model.architecture.max_position_embeddings).save_pretrained(folder / "hf")
    tokenizer = ChatTokenizer(folder / "hf", config.data.chat_template_kwargs)
    prompts = [Prompt(i, ({"role": "user", "content": f"{i:04d}"},), f"{i:04d}") for i in range(4096)]
    graders = stack.enter_context(GraderPool.of(config))
    store = QueueStore(folder / "rollouts")
    if uses_queue(config):
        generator = TrajectoryGenerator(config, prompts, tokenizer, client, store, graders)
        source: SharedSource = QueueSource(runner, None, 120.0, client, generator, is_ahead)
    else:
        maker = RolloutCoordinator(config, prompts, tokenizer, client, store, graders)
        source = SharedSource(runner, None, 120.0, client, maker)
    shards = EngineShards(OneTensor(), client, runner)  # type: ignore[arg-type]
    publisher = WeightPublisher(config, shards, folder / "served", folder / "hf")
    given: dict[str, Any] = {"policy": None, "objective": None, "comparison": None, "state": NoState()}
    return ScriptedRun(config, source=source, publisher=publisher, sinks=None, traces=folder, **given), url


def _timed(run: ScriptedRun, generated: Counter[int]) -> Timed:
    """Return the figures of a finished run; every response that was begun has to be one that was trained on."""
    ages, trained = Counter[int](), Counter[int]()
    longest, tails = [], []
    for step, rollout in enumerate(run.rollouts):
        trajectories = [one for group in rollout.groups for one in group.trajectories]
        trained.update(one.num_sampled for one in trajectories)
        by_length = sorted(one.num_sampled for one in trajectories)
        longest.append(by_length[-1])
        tails.append(by_length[-1] - by_length[len(by_length) * 9 // 10 - 1])
        for one in trajectories:
            for span in one.versions:
                ages[step - (span.version or 0)] += span.num_tokens
    if trained != generated:
        raise RuntimeError(f"lengths generated but not trained on: {generated - trained}; more: {trained - generated}")
    timed, longest, tails = run.ended[WARM_UP - 1 :], longest[WARM_UP:], tails[WARM_UP:]
    return Timed(
        seconds_per_step=(timed[-1] - timed[0]) / (len(timed) - 1),
        longest_tokens=sum(longest) / len(longest),
        tail_tokens=sum(tails) / len(tails),
        staleness={age: count / ages.total() for age, count in sorted(ages.items())},
        num_trained=sum(length * count for length, count in trained.items()),
        num_generated=sum(length * count for length, count in generated.items()),
    )


if __name__ == "__main__":
    start(main, quick)

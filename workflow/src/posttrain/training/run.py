"""What a training run consists of, and the verbs that the loop speaks.

A `TrainingRun` is made by `open_run` on every rank. Rank 0 also holds the engines' client, the rollout coordinator, the
metric sinks and the checkpoint folder (`Head`); on the other ranks the same verbs do their share of the collectives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.algorithm.mismatch import Mismatch, compare_logprobs
from posttrain.config.load import experiment_of
from posttrain.config.schema import Config
from posttrain.data.chat import ChatTokenizer
from posttrain.data.dataset import load_prompts
from posttrain.engines.client import EngineClient
from posttrain.megatron_backend import checkpoint, train_step
from posttrain.megatron_backend.initialize import joined_ranks
from posttrain.megatron_backend.model import Policy, build_policy
from posttrain.megatron_backend.plain_data import gather_plain, gather_tensors, share_plain
from posttrain.megatron_backend.ranks import (
    data_parallel_rank,
    is_first_of_tensor_parallel,
    seed_random_state,
    sum_over_data_parallel,
)
from posttrain.megatron_backend.weights import HubWeights
from posttrain.observability.rank_progress import ROLLOUT, SHARE_ROLLOUT, keep_reporting, report_progress
from posttrain.observability.sinks import MetricSinks
from posttrain.planner.storage import storage
from posttrain.reward.graders import GraderPool
from posttrain.rollout.coordinator import RolloutCoordinator, RolloutResult
from posttrain.rollout.persisted import RolloutStore
from posttrain.rollout.sharing import as_plain, from_plain
from posttrain.training import early_end
from posttrain.training.batch import Update, make_updates
from posttrain.training.checkpoint_writer import CheckpointWriter, in_thread
from posttrain.training.checkpoints import CheckpointFolder
from posttrain.training.metrics import step_metrics
from posttrain.training.mismatch import heed_mismatch, share_of_limit
from posttrain.training.phases import PhaseClock
from posttrain.training.slow_ranks import SlowRanks, probe_seconds
from posttrain.types import SampleGroup
from posttrain.weight_sync.publish import WeightPublisher, served_format, served_values

log = logging.getLogger(__name__)


@dataclass
class Head:
    """What only rank 0 has.

    Args:
        client: The engines.
        coordinator: Makes rollouts.
        store: Rollouts on disk.
        open_sinks: Opens the metric sinks after the last step that stays, None for a fresh start.
        sinks: The open sinks.
    """

    client: EngineClient
    coordinator: RolloutCoordinator
    store: RolloutStore
    open_sinks: Callable[[int | None], MetricSinks]
    sinks: MetricSinks | None = None


class TrainingRun:
    """One rank's part in a run; see the head of this file.

    Args:
        config: The resolved configuration.
        policy: Model and optimizer of this rank.
        torch_dist: Initial weights.
        checkpoints: Where training states are.
        finished: Finished steps of the one to load, 0 for none.
        content_check: Whether that is what was written.
        checkpoint_writer: Writes them.
        publisher: Brings weights to the engines.
        runner: Event loop for everything that talks to engines.
        head: What only rank 0 has; None elsewhere.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        weights: HubWeights,
        torch_dist: Path,
        checkpoints: CheckpointFolder,
        finished: int,
        content_check: Future[None],
        checkpoint_writer: CheckpointWriter,
        publisher: WeightPublisher,
        runner: asyncio.Runner,
        head: Head | None,
    ):
        self.config, self.checkpoint_writer, self._content_check = config, checkpoint_writer, content_check
        self._policy, self._weights, self._torch_dist = policy, weights, torch_dist
        self._checkpoints, self._publisher, self._runner, self._head = checkpoints, publisher, runner, head
        self._finished, self._num_skipped = finished, 0
        self._slow_ranks = SlowRanks()
        # The present step is the last one of this attempt.
        self.ends_early = False

    @property
    def is_rank0(self) -> bool:
        """This rank speaks for all."""
        return self._head is not None

    # ---- where to begin ----

    def resume(self) -> int:
        """Load the checkpoint to go on from, or the initial weights; bring engines and metrics to the same point.

        Returns:
            The number of finished steps.
        """
        finished = self._finished
        if finished:
            log.info("resuming after step %d", finished)
            self._content_check.result()
            checkpoint.load_training_state(self._policy, self._checkpoints.path(finished))
        else:
            checkpoint.load_weights(self._policy.model, self._torch_dist)
            self._policy.optimizer.reload_model_params()
        self._wait_for_engines()
        if finished:
            self._publisher.publish(finished)
        if self._head:
            self._checkpoints.remove_leftovers()
            self._head.sinks = self._head.open_sinks(finished or None)
        checkpoint.barrier()
        return finished

    def _wait_for_engines(self) -> None:
        """Return when they are ready: they have been loading, too."""
        if self._head:
            started = time.perf_counter()
            self._runner.run(self._head.client.wait_ready(self.config.engine.start_timeout_seconds))
            log.info("the trainer has its weights; engines were ready %.1f s later", time.perf_counter() - started)

    def reseed(self, step: int) -> None:
        """Make all random state a function of the seed and the step: nothing of it has to be saved."""
        seed_random_state(self.config.training.seed + step)

    def find_slow_ranks(self) -> None:
        """Name ranks that compute slower than the others; collective."""
        if dist.get_world_size() == 1:
            return
        probes = gather_plain((probe_seconds(), socket.gethostname()))
        for rank, factor in self._slow_ranks.look([seconds for seconds, _ in probes]).items():
            if self.is_rank0:
                log.warning("rank %d on %s computes %.1f times slower than the median", rank, probes[rank][1], factor)

    # ---- a step ----

    def collect(self, step: int) -> RolloutResult:
        """Return the rollout of a step, the same on every rank."""
        rollout = None
        if self._head:
            rollout = self._runner.run(_collect(self._head.coordinator, step))
            report_progress(step, SHARE_ROLLOUT)
        if dist.get_world_size() > 1:
            shared = share_plain(rollout and as_plain(rollout))
            rollout = rollout or from_plain(shared)
        assert rollout is not None
        return rollout

    def make_updates(self, groups: Sequence[SampleGroup]) -> list[Update]:
        """Return the optimizer updates of a rollout, packed for this data-parallel rank."""
        return make_updates(self.config, groups, data_parallel_rank())

    def with_old_logprobs(self, update: Update) -> Update:
        """Return the update with the log-probabilities that the present weights give."""
        return update.with_old_logprobs(train_step.compute_logprobs(self._policy, update.batches))

    def measure_mismatch(self, step: int, updates: Sequence[Update]) -> tuple[Mismatch, Mismatch | None]:
        """Compare the trainer with the engine: with its own weights, and with the very weights that were served.

        Args:
            step: From 0; the second comparison is made every `trainer.mismatch_interval` steps.
            updates: With their old log-probabilities, before any of them is applied.

        Raises:
            MismatchError: They are too far apart, on every rank alike.
        """
        own, served = self._compare(updates, [update.old_logprobs for update in updates]), None
        interval = self.config.trainer.mismatch_interval
        if interval and step % interval == 0:
            backup = self._weights.transform(served_values(self._weights, served_format(self.config)))
            logprobs = [train_step.compute_logprobs(self._policy, update.batches) for update in updates]
            self._weights.restore(backup)
            served = self._compare(updates, logprobs)
        heed_mismatch(self.config, step, own, served)
        return own, served

    def update(self, update: Update, lr: float) -> train_step.UpdateStatistics:
        """Apply one optimizer update."""
        statistics = train_step.update(self._policy, update.micro_batches(), lr)
        self._num_skipped += not statistics.applied
        return statistics

    def publish(self, finished: int) -> None:
        """Bring the engines to the weights after `finished` steps."""
        self._publisher.publish(finished)

    # ---- checkpoints and metrics ----

    def checkpoint_is_due(self, finished: int) -> bool:
        """Tell whether the state after `finished` steps is to be kept; collective."""
        self.ends_early = share_plain(early_end.is_asked()) and finished < self.config.training.num_steps
        is_last = finished == self.config.training.num_steps
        return self.ends_early or is_last or finished % self.config.trainer.save_interval == 0

    def log_step(
        self,
        step: int,
        rollout: RolloutResult,
        updates: Sequence[Update],
        statistics: Sequence[train_step.UpdateStatistics],
        mismatch: tuple[Mismatch, Mismatch | None],
        clock: PhaseClock,
    ) -> dict[str, float]:
        """Write the metrics of a step; returns them on rank 0, nothing elsewhere."""
        padding, tokens = self._count_tokens(updates)
        if self._head is None:
            return {}
        metrics = step_metrics(rollout, statistics, mismatch, clock)
        metrics |= {
            "train/lr": train_step.learning_rate(self.config, step),
            "train/num_micro_batches": sum(update.num_micro_batches for update in updates),
            "train/padding_fraction": padding / tokens,
            "train/non_finite_steps": self._num_skipped,
            "mismatch/share_of_limit": share_of_limit(self.config, *mismatch),
        }
        assert self._head.sinks is not None, "resume() opens the sinks"
        self._head.sinks.log(step + 1, metrics)
        return metrics

    def _count_tokens(self, updates: Sequence[Update]) -> tuple[float, float]:
        """Return padding and computed tokens of all data-parallel ranks."""
        batches = [batch for update in updates for batch in update.batches]
        counts = torch.tensor([float(sum(b.num_padding for b in batches)), float(sum(len(b.tokens) for b in batches))])
        if torch.cuda.is_available():
            counts = counts.cuda()
        sum_over_data_parallel(counts)
        return float(counts[0]), float(counts[1])

    def _compare(self, updates: Sequence[Update], logprobs: Sequence[Sequence[torch.Tensor]]) -> Mismatch:
        """Compare log-probabilities with those of the engine over all response tokens of all ranks."""
        own, engine = [torch.empty(0)], [torch.empty(0)]
        # Tensor-parallel ranks hold the same values: one of them reports.
        for update, rows in zip(updates, logprobs, strict=True) if is_first_of_tensor_parallel() else ():
            for batch, row in zip(update.batches, rows, strict=False):
                for index, values in batch.response_values(row.cpu()).items():
                    own.append(values)
                    engine.append(torch.tensor(update.samples[index].rollout_logprobs))
        return compare_logprobs(*(torch.cat(gather_tensors(torch.cat(values))) for values in (own, engine)))


async def _collect(coordinator: RolloutCoordinator, step: int) -> RolloutResult:
    alive = asyncio.create_task(keep_reporting(step, ROLLOUT))
    try:
        return await coordinator.collect(step)
    finally:
        alive.cancel()


@contextmanager
def open_run(
    config: Config,
    run_name: str,
    run_folder: Path,
    torch_dist: Path,
    model_folder: Path,
    dataset: Path,
    engine_urls: Sequence[str],
    engine_secret: str,
    may_commit: Callable[[], None],
    finished: int | None = None,
) -> Iterator[TrainingRun]:
    """Join the ranks, build the policy, and open everything that the loop needs; closes it all at the end.

    Args:
        config: The resolved configuration.
        run_name: Name of the run in W&B.
        run_folder: Checkpoints, rollouts, metrics.
        torch_dist: Initial weights.
        model_folder: Checkpoint in Hub layout, with the tokenizer.
        dataset: Folder with `train.jsonl`.
        engine_urls: Engines, ready or about to be.
        engine_secret: What they want to be shown.
        may_commit: See `CheckpointFolder`.
        finished: Finished steps of the checkpoint to load, 0 for none; by default of the newest that this node sees.

    Raises:
        RuntimeError: This node sees a newer one.
    """
    checkpoints = CheckpointFolder(run_folder / "checkpoints", config.trainer.keep_checkpoints, may_commit)
    # Reading a checkpoint takes longest of all: it begins before the ranks meet and the model is built.
    newest = checkpoints.newest_step()
    if finished is not None and newest > finished:
        raise RuntimeError(f"step {newest} is committed, but the head of the job saw only step {finished}: start again")
    finished = newest if finished is None else finished
    content_check = in_thread(partial(_check_content, checkpoints, finished))
    with ExitStack() as stack:
        stack.enter_context(joined_ranks(config))
        runner = stack.enter_context(asyncio.Runner())
        policy = build_policy(config)
        weights = HubWeights(policy.model, config.model.architecture)
        head, client = None, None
        if dist.get_rank() == 0:
            client = _open_client(config, engine_urls, engine_secret, runner, stack)
            head = _open_head(config, run_name, run_folder, model_folder, dataset, client, stack)
            stack.callback(lambda: head.sinks and head.sinks.close())
        publisher = WeightPublisher(config, weights, client, runner, run_folder / "served_weights", model_folder)
        forget_before = head.store.forget_before if head else lambda _: None
        writer = CheckpointWriter(policy, checkpoints, storage(config).training_checkpoint, forget_before)
        yield TrainingRun(
            config, policy, weights, torch_dist, checkpoints, finished, content_check, writer, publisher, runner, head
        )


def _check_content(checkpoints: CheckpointFolder, finished: int) -> None:
    """Compare this rank's share of a checkpoint, if there is one, with what was written."""
    if finished:
        checkpoints.check_content(finished, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _open_client(
    config: Config, engine_urls: Sequence[str], secret: str, runner: asyncio.Runner, stack: ExitStack
) -> EngineClient:
    client = EngineClient(
        engine_urls,
        secret,
        config.engine.request_timeout_seconds,
        ranks_per_engine=config.engine.gpus_per_engine,
        vocab_size=config.model.architecture.vocab_size,
    )
    runner.run(client.__aenter__())
    stack.callback(lambda: runner.run(client.__aexit__(None, None, None)))
    return client


def _open_head(
    config: Config,
    run_name: str,
    run_folder: Path,
    model_folder: Path,
    dataset: Path,
    client: EngineClient,
    stack: ExitStack,
) -> Head:
    store = RolloutStore(run_folder / "rollouts")
    coordinator = RolloutCoordinator(
        config,
        prompts=load_prompts(dataset / "train.jsonl", config.data.prompt_key, config.data.label_key),
        tokenizer=ChatTokenizer(model_folder),
        client=client,
        store=store,
        graders=stack.enter_context(GraderPool()),
    )
    open_sinks = partial(MetricSinks, run_folder, run_name, config.logging, config=experiment_of(config))
    return Head(client, coordinator, store, lambda last_step: open_sinks(last_step=last_step))

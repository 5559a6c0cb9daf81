"""One rank's operations of a training step. `assembly.open_run` builds the run.

Rank 0 also talks to the engines, writes metrics and commits checkpoints; on other ranks the same methods take part in
the collectives.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs
from posttrain.config.derived import is_off_policy, runs_ahead
from posttrain.config.schema import Config
from posttrain.config.suites import evaluation_is_due
from posttrain.report.sinks import MetricSinks
from posttrain.rl.algorithm.mismatch import Mismatch
from posttrain.rl.algorithm.objective import Objective
from posttrain.rl.megatron_backend import checkpoint, train_step
from posttrain.rl.megatron_backend.learning_rate import learning_rate
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.plain_data import gather_plain, share_plain
from posttrain.rl.megatron_backend.ranks import data_parallel_rank, seed_random_state, sum_over_data_parallel
from posttrain.rl.rollout.source import RolloutSource
from posttrain.rl.training import graceful_shutdown
from posttrain.rl.training.batch import Update, make_updates
from posttrain.rl.training.colocation import Colocation
from posttrain.rl.training.metrics import step_metrics
from posttrain.rl.training.mismatch import EngineComparison, share_of_limit
from posttrain.rl.training.phases import PhaseClock
from posttrain.rl.training.reference_logprobs import record_reference_logprobs
from posttrain.rl.training.saved_state import SavedState
from posttrain.rl.training.slow_ranks import SlowRanks, probe_seconds
from posttrain.rl.training.staleness import staleness_metrics
from posttrain.rl.training.step_evaluation import StepEvaluation
from posttrain.rl.training.utilisation import model_flops_utilisation, traced
from posttrain.rl.weight_sync.publish import WeightPublisher
from posttrain.types import RolloutResult, TrajectoryGroup

log = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """A training run on one rank.

    Args:
        config: The resolved configuration.
        policy: Model and optimizer of this rank.
        objective: The training objective.
        source: Makes rollouts.
        comparison: Compares log-probabilities of engine and trainer; None without engines.
        publisher: Sends weights to the engines; None without engines.
        state: Loads and saves checkpoints.
        sinks: Receive metrics, on rank 0; None elsewhere.
        traces: Folder for the traces of `logging.profile_steps`.
        evaluation: Evaluates the policy between steps, on rank 0 if configured.
        turns: Colocation of trainer and engines; None without it.
        ends_early: The current step is this attempt's last.
    """

    config: Config
    policy: Policy
    objective: Objective
    source: RolloutSource
    comparison: EngineComparison | None
    publisher: WeightPublisher | None
    state: SavedState
    sinks: MetricSinks | None
    traces: Path
    evaluation: StepEvaluation | None = None
    turns: Colocation | None = None
    ends_early: bool = False
    _num_non_finite: int = 0
    _pause_seconds: float = 0.0  # of running requests, for the step's publishes
    _slow_ranks: SlowRanks = field(default_factory=SlowRanks)

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        return self.sinks is not None

    def resume(self) -> int:
        """Load the newest state and send it to the engines; returns the number of finished steps."""
        finished = self.state.restore()
        self.source.wait_ready()
        if finished or self.turns or (self.publisher and self.publisher.is_due_at_start):
            with self.clock(finished).phase("weight_sync"):
                self.publish(finished)
        if self.is_rank0:
            self.state.remove_leftovers()
        if self.evaluation:
            self.evaluation.forget_from(finished)
        self.source.begin(finished)
        checkpoint.barrier()
        return finished

    def publish(self, finished: int, has_new_engine: bool = False) -> None:
        """Update the engines, if any, to the weights after `finished` steps; collective.

        Args:
            finished: Number of finished steps.
            has_new_engine: An engine has been replaced, so it does not hold the weights published last.

        Raises:
            RuntimeError: An engine that runs requests holds other weights than those published last.
        """
        if self.publisher:
            started = time.perf_counter()
            with self.source.publishing(finished) as requests_run:
                if requests_run and not has_new_engine:
                    self.publisher.reverify()
                self.publisher.publish(finished)
            self._pause_seconds += (time.perf_counter() - started) * requests_run
        if self.turns:
            self.turns.have_published()

    def clock(self, step: int) -> PhaseClock:
        """Return the phase clock of a step (from 0); with colocation each phase wakes the models that it needs."""
        return PhaseClock(step, self.turns.enter if self.turns else None)

    def collect(self, step: int) -> RolloutResult:
        """Return the rollout of a step (from 0), sampled by engines that held the weights they were sent; collective.

        Raises:
            RuntimeError: An engine held other weights, or a failed engine did not come back; the rollout is not used.
        """
        rollout = self.source.collect(step, lambda failure: self._recover(step, failure))
        if self.publisher and not runs_ahead(self.config):  # else they are verified before they get new weights
            self.publisher.reverify()
        return rollout

    def _recover(self, step: int, failure: str) -> None:
        """Replace an engine that failed during a rollout and send it the weights; collective.

        All engines receive them again, because the trainer cannot send to one engine alone.
        """
        if self.is_rank0:
            log.warning("step %d: an engine has failed and is asked again when it is back: %s", step + 1, failure)
        self.source.wait_ready(step)
        if self.turns:
            self.turns.enter("weight_sync")
        if self.publisher:
            self.publisher.reconnect()
        self.publish(step, has_new_engine=True)
        if self.turns:
            self.turns.enter("rollout")

    def evaluate(self, finished: int, clock: PhaseClock) -> dict[str, float]:
        """Evaluate the engines' weights if due; return metrics on rank 0. Collective.

        It runs before a step rather than after one: a checkpoint is written meanwhile, and a run that is killed in
        between evaluates when it resumes.
        """
        if not evaluation_is_due(self.config, finished):
            return {}
        with clock.phase("evaluation"):
            metrics = self.evaluation.measure(finished) if self.evaluation else {}
            checkpoint.barrier()
        return metrics

    def reseed(self, step: int) -> None:
        """Derive all random state from seed and step, so that none has to be saved."""
        seed_random_state(self.config.training.seed + step)

    def traced(self, step: int) -> AbstractContextManager[None]:
        """Profile a step (from 0) on rank 0 if configured."""
        steps = {int(chosen) for chosen in self.config.logging.profile_steps if self.is_rank0}
        return traced(step + 1, steps, self.traces)

    def find_slow_ranks(self) -> None:
        """Report ranks that compute slower than the others; collective."""
        if dist.get_world_size() == 1:
            return
        probes = gather_plain((probe_seconds(), socket.gethostname()))
        for rank, factor in self._slow_ranks.observe([seconds for seconds, _ in probes]).items():
            if self.is_rank0:
                log.warning("rank %d on %s computes %.1f times slower than the median", rank, probes[rank][1], factor)

    def make_updates(self, groups: Sequence[TrajectoryGroup]) -> list[Update]:
        """Return the optimizer updates of a rollout, packed for this data-parallel rank."""
        return make_updates(self.config, self.objective, groups, data_parallel_rank())

    def with_old_logprobs(self, step: int, updates: Sequence[Update]) -> list[Update]:
        """Return the updates with log-probabilities of the current weights, if the objective needs them.

        The first update's training pass computes the same values, so it needs none. If the step is compared it gets
        them anyway: the ratio of the two passes must be exactly 1.
        """
        is_compared = self.comparison is not None and self.comparison.is_due(step)
        num_own = len(updates) if not self.objective.needs.old_logprobs else int(not is_compared)
        passed = [u.with_old_logprobs(train_step.compute_logprobs(self.policy, u.batches)) for u in updates[num_own:]]
        return [*updates[:num_own], *passed]

    def compare_served(self, step: int, updates: Sequence[Update]) -> Mismatch | None:
        """Compare using exactly the weights that engines serve, if due; see `EngineComparison`."""
        return self.comparison.on_served_weights(step, updates) if self.comparison else None

    def train_on(
        self, step: int, updates: Sequence[Update], served: Mismatch | None
    ) -> tuple[list[train_step.UpdateStatistics], Mismatch | None]:
        """Apply the updates of a step; check the mismatch with the engine before the first one.

        Args:
            step: From 0.
            updates: In order, from `with_old_logprobs`.
            served: The result of `compare_served`.

        Returns:
            Statistics of each update, and the mismatch with the engine; None without engines.

        Raises:
            MismatchError: The mismatch is too large, and the configuration says stop.
        """
        found: list[Mismatch | None] = []

        def observe(logprobs: Sequence[torch.Tensor]) -> None:
            before = [updates[0].with_old_logprobs(logprobs), *updates[1:]]
            known = before if self.objective.needs.old_logprobs else before[:1]
            if self.comparison:
                found.append(self.comparison.on_own_weights(step, known, served))

        lr, first, last = learning_rate(self.config, step), updates[0], updates[-1]
        statistics = [self._update(u, lr, observe if u is first else None, is_last=u is last) for u in updates]
        return statistics, found[0] if found else None

    def _update(
        self, update: Update, lr: float, observe: Callable[[list[torch.Tensor]], None] | None, is_last: bool
    ) -> train_step.UpdateStatistics:
        """Apply one optimizer update; see `train_step.update`."""
        has_signal = update.has_signal or self.config.algorithm.zero_advantages == "update"
        micro_batches = update.micro_batches(self.objective.needs)
        statistics = train_step.update(self.policy, self.objective, micro_batches, lr, has_signal, observe, is_last)
        self._num_non_finite += statistics.outcome == train_step.NON_FINITE
        return statistics

    def canary_of(self, finished: int, rollout: RolloutResult) -> ReferenceLogprobs | None:
        """Return the reference log-probabilities after a run's last step, None before; collective."""
        is_last = finished == self.config.training.num_steps
        return record_reference_logprobs(self.config, self.policy, rollout.groups) if is_last else None

    def checkpoint_is_due(self, finished: int) -> bool:
        """Return whether to save the state after `finished` steps; collective."""
        self.ends_early = share_plain(graceful_shutdown.is_asked()) and finished < self.config.training.num_steps
        is_last = finished == self.config.training.num_steps
        return self.ends_early or is_last or finished % self.config.trainer.save_interval == 0

    def log_step(
        self,
        step: int,
        rollout: RolloutResult,
        updates: Sequence[Update],
        statistics: Sequence[train_step.UpdateStatistics],
        mismatch: tuple[Mismatch | None, Mismatch | None],
        evaluated: Mapping[str, float],
        clock: PhaseClock,
    ) -> dict[str, float]:
        """Write the metrics of a step; returns them on rank 0, nothing elsewhere."""
        padding, tokens = _count_tokens(updates)
        experts = self.policy.expert_load.take()
        memory = gather_plain(clock.peak_gib)
        if self.sinks is None:
            return {}
        lengths = [one.num_tokens for update in updates for one in update.trajectories]
        metrics = step_metrics(rollout, statistics, mismatch, clock, is_graded=self.objective.needs.rollout)
        metrics |= experts | {
            **evaluated,
            **{f"perf/{name}_peak_gib": max(peaks[name] for peaks in memory) for name in clock.peak_gib},
            "perf/mfu": model_flops_utilisation(self.config, lengths, clock.seconds["train"]),
            "train/lr": learning_rate(self.config, step),
            "train/num_micro_batches": sum(update.num_micro_batches for update in updates),
            "train/padding_fraction": padding / tokens,
            "train/non_finite_steps": self._num_non_finite,
        }
        own, served = mismatch
        metrics |= {"mismatch/share_of_limit": share_of_limit(self.config, own, served)} if own else {}
        metrics |= rollout.queue
        metrics |= staleness_metrics(step, rollout.groups) if is_off_policy(self.config) else {}
        if self._pause_seconds:
            metrics["perf/publish_pause_seconds"], self._pause_seconds = self._pause_seconds, 0.0
        self.sinks.log(step + 1, metrics)
        return metrics


def _count_tokens(updates: Sequence[Update]) -> tuple[float, float]:
    """Return the padding tokens and the computed tokens of all data-parallel ranks."""
    batches = [batch for update in updates for batch in update.batches]
    counts = torch.tensor([float(sum(b.num_padding for b in batches)), float(sum(len(b.tokens) for b in batches))])
    if torch.cuda.is_available():
        counts = counts.cuda()
    sum_over_data_parallel(counts)
    return float(counts[0]), float(counts[1])

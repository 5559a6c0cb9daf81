"""Checks that depend on values: counts over ranks, and an update that must be skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.config.derived import data_parallel_size
from posttrain.config.schema import Config
from posttrain_rehearsal.device import SimulatedDevice
from posttrain_rehearsal.messages import HangError
from posttrain_rehearsal.recorder import Recorder

# The step after whose last update a non-finite update follows.
SPOILED_STEP = 2
SPOILED = "spoiled update"
LOAD, UPDATES = "rl/megatron_backend/expert_load.py", "rl/megatron_backend/train_step.py"


def provide(recorder: Recorder, device: SimulatedDevice, spoils: bool) -> None:
    """Check counts against the batch, and check that all ranks skip a non-finite update.

    Samples of different lengths are not checked, because the tokens of absent ranks are unknown.

    Args:
        recorder: Gets the counts.
        device: This rank's device.
        spoils: Whether this rank's gradients are non-finite.
    """
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.run import TrainingRun

    apply, log, passes = TrainingRun._update, TrainingRun.log_step, train_step._run_schedule
    reports: list[torch.Tensor] = []

    def noted(*given: Any, **more: Any) -> list[Any]:
        said = passes(*given, **more)
        reports[:] = [answer[1].clone() for answer in said[:1] if isinstance(answer, tuple)]
        return said

    def update(self: TrainingRun, given: Any, lr: float, look: Any, is_last: bool) -> Any:
        recorder.sums.clear()
        statistics = apply(self, given, lr, look, is_last)
        if _are_alike(given.trajectories):
            trained = sum(trajectory.num_sampled for trajectory in given.trajectories)
            where = next((where for where, values in recorder.sums if statistics.num_tokens in values), "")
            recorder.counted.append(("tokens in an update", statistics.num_tokens, trained, where))
        if recorder.step == SPOILED_STEP and is_last:
            with (
                recorder.phase(SPOILED),
                _without_passes(train_step, device, reports),
                device.assuming_nothing_finite(spoils),
            ):
                _expect_nothing(recorder, lambda: apply(self, given, lr, None, True))
        return statistics

    def log_step(self: TrainingRun, step: int, rollout: Any, updates: Sequence[Any], *rest: Any) -> Any:
        recorder.sums.clear()
        metrics = log(self, step, rollout, updates, *rest)
        if self.config.model.architecture.n_routed_experts and all(
            _are_alike(update.trajectories) for update in updates
        ):
            _count_routed(recorder, self.config, updates)
        return metrics

    train_step._run_schedule = noted
    TrainingRun._update, TrainingRun.log_step = update, log_step  # type: ignore[assignment,method-assign]


def _count_routed(recorder: Recorder, config: Config, updates: Sequence[Any]) -> None:
    arch = config.model.architecture
    # Sums over each layer's experts; other sums of that file have few numbers.
    sums = (pair for pair in recorder.sums if pair[0].startswith(LOAD) and len(pair[1]) >= arch.n_routed_experts)
    where, counts = next(sums, ("", []))
    if counts:
        tokens = sum(len(batch.tokens) for update in updates for batch in update.batches) * data_parallel_size(config)
        expected = len(counts) // arch.n_routed_experts * arch.num_experts_per_tok * tokens
        recorder.counted.append(("routed tokens in a step", int(sum(counts)), expected, where))


def _are_alike(trajectories: Sequence[Any]) -> bool:
    return len({trajectory.num_tokens for trajectory in trajectories}) == 1


@contextmanager
def _without_passes(module: Any, device: SimulatedDevice, reports: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run an update with unknown gradients, without computing a micro-batch."""
    schedule = module._run_schedule

    def leave_gradients(policy: Any, *_: Any, **__: Any) -> list[Any]:
        for buffer in policy.buffers:
            device.forget(buffer.grad_data)
        return [(report, report) for report in reports]

    module._run_schedule = leave_gradients
    try:
        yield
    finally:
        module._run_schedule = schedule


def _expect_nothing(recorder: Recorder, apply: Any) -> None:
    """Apply an update that all ranks should skip or reject.

    Raises:
        HangError: Only some ranks apply it.
    """
    from posttrain.rl.megatron_backend.train_step import NON_FINITE

    try:
        outcome = apply().outcome
    except HangError as error:
        error.args = (f"of an update with one rank's bad gradients, which not all leave out: {error}",)
        raise
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        outcome = NON_FINITE
    recorder.counted.append(("spoiled updates left out", int(outcome == NON_FINITE), 1, UPDATES))

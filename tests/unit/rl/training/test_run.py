from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.rl.megatron_backend import conftest as one_rank

from posttrain.plan.resolve import resolve
from posttrain.rl.algorithm.mismatch import Mismatch
from posttrain.rl.megatron_backend.train_step import compute_logprobs
from posttrain.rl.training.assembly import open_run
from posttrain.rl.training.batch import make_updates
from posttrain.rl.training.mismatch import EngineComparison, MismatchError

ROOT = Path(__file__).parents[4]
checkpoint, make_policy = one_rank.checkpoint, one_rank.make_policy


@pytest.mark.parametrize("finished", [0, 2])
def test_a_rank_that_sees_a_newer_checkpoint_than_its_head_did_does_not_begin(tmp_path: Path, finished: int) -> None:
    """A shared folder that the head saw late: training from there would do steps twice."""
    for step in (2, 4):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    config = resolve({"model": "tiny", "site": "local"}, ROOT / "config").config
    nothing = tmp_path / "nothing"
    run = open_run(config, "run", tmp_path, nothing, nothing, nothing, ["http://nobody"], "secret", print, finished)
    with pytest.raises(RuntimeError, match=f"step 4 is committed, but the head of the job saw only step {finished}"):
        run.__enter__()


class _Parts:
    """A run's policy, objective and comparison, all real; its policy counts forward passes of micro-batches."""

    def __init__(self, make_policy, **algorithm):
        from tests.support.small_updates import objective_of, rollout, trained_config

        from posttrain.rl.megatron_backend.served_values import ServedValues
        from posttrain.rl.megatron_backend.weights import HubWeights
        from posttrain.rl.training.mismatch import EngineComparison
        from posttrain.rl.training.run import TrainingRun
        from posttrain.rl.weight_sync.publish import served_format

        config = trained_config(**algorithm)
        trainer = dataclasses.replace(config.trainer, mismatch_interval=3)
        training = dataclasses.replace(config.training, num_steps=5)
        config = dataclasses.replace(config, trainer=trainer, training=training)
        policy = make_policy(config)
        self.weights = HubWeights(policy.chunks, config.model.architecture)
        self.values = ServedValues(self.weights, served_format(config))
        comparison = EngineComparison(config, policy, self.values)
        nothing: dict[str, Any] = dict.fromkeys(("source", "publisher", "state", "sinks", "traces"))
        self.run = TrainingRun(config, policy, objective_of(policy), comparison=comparison, **nothing)
        self.updates = make_updates(config, self.run.objective, rollout(0), dp_rank=0)
        self.num_passes, forward = 0, policy.wrapped[0].forward

        def counting(*args, **kwargs):
            self.num_passes += 1
            return forward(*args, **kwargs)

        policy.wrapped[0].forward = counting

    def passes(self, step: int) -> tuple[list[int], Mismatch]:
        """Run a step on the same rollout; return passes of its three phases, and what was compared."""
        counts, before = [], self.num_passes
        updates = self.run.with_old_logprobs(step, self.updates)
        counts.append(self.num_passes - before)
        served = self.run.comparison.on_served_weights(step, updates)
        counts.append(self.num_passes - before - counts[0])
        statistics, own = self.run.train_on(step, updates, served)
        assert (served is None) == (step in (1, 2))
        assert statistics[0].named["approx_kl"] == 0.0 or not self.run.objective.needs.old_logprobs
        assert statistics[1].named["approx_kl"] > 0.0
        return [*counts, self.num_passes - before - sum(counts)], own

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.weights.gather(dtype=torch.float32)}


def test_no_pass_is_made_that_another_one_makes(make_policy) -> None:
    parts = _Parts(make_policy)
    first, second = (len(update.batches) for update in parts.updates)
    both = first + second
    found = {step: parts.passes(step)[0] for step in range(5)}
    compared = [both, both, both]  # old log-probabilities, weights served, updates
    assert found == {0: compared, 1: [second, 0, both], 2: [second, 0, both], 3: compared, 4: compared}


def test_a_ratio_to_the_engine_needs_no_pass_but_the_updates(make_policy) -> None:
    parts = _Parts(make_policy, old_logprobs="engine")
    both = sum(len(update.batches) for update in parts.updates)
    (old, served, train), own = parts.passes(1)
    assert (old, served, train) == (0, 0, both)
    assert own.abs_diff_mean > 0.1, "of the first update's samples"


def test_the_comparison_has_the_samples_of_all_updates_before_any(make_policy) -> None:
    """With two passes or with one, over both updates of the rollout, and the same number."""
    parts = _Parts(make_policy)
    engine = -4.0
    apart = [
        (values - engine).abs()
        for update in parts.updates
        for batch, row in zip(update.batches, compute_logprobs(parts.run.policy, update.batches), strict=True)
        for values in batch.response_values(row).values()
    ]
    found = [_Parts(make_policy).passes(step)[1] for step in (0, 1)]
    assert found[0] == found[1]
    assert found[0].abs_diff_mean == pytest.approx(torch.cat(apart).double().mean().item(), rel=1e-6)


def test_an_engine_too_far_away_stops_before_a_weight_moves(make_policy) -> None:
    parts = _Parts(make_policy)
    limits = dataclasses.replace(parts.run.config.trainer.mismatch, action="stop", quantised=1e-3)
    trainer = dataclasses.replace(parts.run.config.trainer, mismatch=limits)
    config = dataclasses.replace(parts.run.config, trainer=trainer)
    parts.run.comparison = EngineComparison(config, parts.run.policy, parts.values)
    before = parts.tensors()
    with pytest.raises(MismatchError, match="Nothing was learned"):
        parts.passes(1)
    assert parts.num_passes == sum(len(update.batches) for update in parts.updates), "the second update did not begin"
    assert all(torch.equal(before[name], now) for name, now in parts.tensors().items())

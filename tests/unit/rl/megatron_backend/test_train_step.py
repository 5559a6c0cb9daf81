"""The product's own update, on real Megatron, against GRPO and AdamW written a second time (`independent_grpo`)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.algorithms import objective
from tests.support.independent_grpo import IndependentGrpo, advantages
from tests.support.small_updates import (
    LEARNING_RATES,
    LR,
    SAMPLES_PER_UPDATE,
    SETTINGS,
    UPDATES_PER_STEP,
    apply,
    objective_of,
    rollout,
    trained_config,
    updates_of,
    weights_of,
)

from posttrain.types import TrajectoryGroup


@dataclasses.dataclass
class Trained:
    """Both after the same updates: weights before and after, and what each update said."""

    start: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    statistics: list[tuple[dict, dict]]
    old_logprobs: list[tuple[torch.Tensor, torch.Tensor]]


def test_dispatchers_keep_nothing_with_a_history(make_policy):
    """Through it a layer's input and its gradient would stay until the next pass."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    policy = make_policy(trained_config())
    apply(policy, updates_of(policy, 0)[0], LR)
    layers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, MoELayer)]
    kept = [name for layer in layers for name, value in vars(layer.token_dispatcher).items() if has_history(value)]
    assert (len(layers) > 0, kept) == (True, [])


def has_history(value):
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


@pytest.fixture(scope="module")
def trained(make_policy, make_reference) -> Trained:
    from posttrain.rl.megatron_backend.learning_rate import learning_rate

    policy = make_policy(trained_config())
    other = IndependentGrpo(make_reference(), SETTINGS)
    result = Trained(other.weights(), {}, {}, [], [])
    for step, lr in enumerate(LEARNING_RATES):
        groups = rollout(step)
        samples = [sample for group in groups for sample in group.trajectories]
        values = advantages([[sample.reward for sample in group.trajectories] for group in groups])
        with torch.no_grad():
            old = [other.logprobs(sample.tokens, sample.loss_mask) for sample in samples]
        for number, update in enumerate(updates_of(policy, step)):
            part = slice(number * SAMPLES_PER_UPDATE, (number + 1) * SAMPLES_PER_UPDATE)
            assert len(update.batches) > 2
            for batch, row in zip(update.batches, update.old_logprobs, strict=True):
                result.old_logprobs += [(v, old[part][i]) for i, v in batch.response_values(row).items()]
            mine = dataclasses.asdict(apply(policy, update, learning_rate(policy.config, step)))
            theirs = other.update(samples[part], old[part], values[part], lr)
            result.statistics.append((mine | mine.pop("named"), theirs))
    result.ours, result.theirs = weights_of(policy), other.weights()
    return result


def test_every_weight_moves_as_an_independent_grpo_and_adamw_move_it(trained: Trained) -> None:
    difference, whole = 0.0, 0.0
    for name in trained.ours.keys() - frozen(trained.ours):
        move = trained.theirs[name] - trained.start[name]
        error = (trained.ours[name] - trained.theirs[name]).norm()
        # FP32 itself rounds a norm's weight, which is about 1, to 1e-7.
        assert error <= 1e-5 * move.norm() + 1e-7 * trained.start[name].norm(), name
        assert move.norm() > 1e-4 * trained.start[name].norm(), name
        difference, whole = difference + error**2, whole + move.norm() ** 2
    assert difference**0.5 <= 1e-5 * whole**0.5


def test_what_is_frozen_keeps_its_bits(trained: Trained, checkpoint) -> None:
    assert len(frozen(trained.ours)) > 10
    for name in frozen(trained.ours):
        assert torch.equal(trained.ours[name], checkpoint[1][name].float()), name


def frozen(names) -> set[str]:
    return {name for name in names if ".indexer." in name or name.endswith("e_score_correction_bias")}


def test_old_log_probabilities_equal_transformers(trained: Trained) -> None:
    assert len(trained.old_logprobs) == len(LEARNING_RATES) * UPDATES_PER_STEP * SAMPLES_PER_UPDATE
    for ours, theirs in trained.old_logprobs:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-5


def test_statistics_equal_numpy(trained: Trained) -> None:
    assert len(trained.statistics) == len(LEARNING_RATES) * UPDATES_PER_STEP
    for number, (ours, theirs) in enumerate(trained.statistics):
        assert ours.pop("outcome") == "applied"
        assert ours.keys() == theirs.keys()
        assert ours["num_tokens"] == theirs["num_tokens"]
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (number, name)
        is_first = number % UPDATES_PER_STEP == 0
        starts_from_it = ours["first_update_ratio_max_abs_deviation"] == 0.0
        assert starts_from_it == is_first, "the first update on a rollout starts from its policy"
        assert ours["grad_norm"] > SETTINGS.max_norm, "or clipping is not tested"
        assert is_first or 0.2 < ours["clip_fraction"] < 0.8
        assert is_first or abs(ours["loss"]) > 1e-2


def test_the_sums_of_a_micro_batch_by_hand() -> None:
    """Prompt (5, 9), response (7, 1, 3), padding; the log ratios of the response are -1, 0 and 1/4."""
    from posttrain.rl.algorithm.objective import TokenBatch
    from posttrain.rl.megatron_backend.train_step import _loss, _names

    old = torch.tensor([-1.0, -2.0, -1.5, -3.0, -1.0, -1.0])
    logprobs = old + torch.tensor([2.0, -1.0, 0.0, 0.25, 2.0, 2.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    batch = TokenBatch((5, 1), mask > 0, -2 * mask, mask / 4, old)
    grpo = objective(clip_ratio_low=0.2, clip_ratio_high=0.28)
    entropies = torch.tensor([9.0, 0.5, 1.5, 0.25, 9.0, 9.0])
    loss, _, (kept, sums) = _loss(torch.stack([logprobs, entropies]), batch, grpo)
    assert torch.equal(kept, logprobs)
    # Advantage -2: the losses are 2 x 0.8 (clipped), 2 x 1 and 2 e^(1/4), each with a weight of 1/4.
    less, more = math.exp(-1), math.exp(0.25)
    assert loss.item() == pytest.approx((1.6 + 2 + 2 * more) / 4)
    assert sums[0] == pytest.approx(loss.item())
    expected = {
        "num_tokens": 3,
        "non_finite": 0,
        "entropy": 2.25,
        "importance_ratio_mean": less + 1 + more,
        "first_update_ratio_max_abs_deviation": 1 - less,
        "clip_fraction": 1,
        "approx_kl": (less - 1 + 1) + 0 + (more - 1 - 0.25),
        "importance_ratio_square_mean": less**2 + 1 + more**2,
        # The three tokens of the response stand in its first, second and third quarter.
        "ratio_part1_far_below": 1,
        "ratio_part2_near": 1,
        "ratio_part3_far_above": 1,
    }
    named = dict(zip(_names(grpo), sums.tolist(), strict=True))
    assert {name: named[name] for name in expected} == pytest.approx(expected, rel=1e-13)
    assert not any(named[name] for name in named.keys() - expected.keys() - {"loss"}), "nothing in the other bins"
    assert len(named.keys() - expected.keys()) == 1 + 17
    assert sums.dtype == torch.float64
    logprobs[[0, 2]] = math.nan  # of a prompt's token and of a response's
    assert _loss(torch.stack([logprobs, entropies]), batch, grpo)[2][1][_names(grpo).index("non_finite")] == 1


def test_the_first_update_on_a_rollout_needs_no_pass_before_it(make_policy) -> None:
    """Its own log-probabilities are those before it: loss, gradient and weights have the bits of two passes."""
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    after, said, seen = [], [], []
    for has_pass in (True, False):
        policy = make_policy(trained_config())
        grpo = objective_of(policy)
        first = make_updates(policy.config, grpo, rollout(0), dp_rank=0)[0]
        passed = train_step.compute_logprobs(policy, first.batches)
        update = first.with_old_logprobs(passed) if has_pass else first
        start = weights_of(policy)

        def look(logprobs: list[torch.Tensor], passed=passed, start=start, policy=policy) -> None:
            seen.extend(zip(logprobs, passed, strict=True))
            assert all(torch.equal(start[name], now) for name, now in weights_of(policy).items())

        said.append(train_step.update(policy, grpo, update.micro_batches(grpo.needs), LR, look=look))
        after.append(weights_of(policy))
    assert len(seen) > 4
    assert all(torch.equal(own, passed) for own, passed in seen)
    assert said[0] == said[1]
    assert all(torch.equal(after[1][name], value) for name, value in after[0].items())


def test_what_raises_before_the_weights_move_keeps_them(make_policy) -> None:
    from posttrain.rl.megatron_backend import train_step

    policy = make_policy(trained_config())
    before, grpo = weights_of(policy), objective_of(policy)
    batches = updates_of(policy, 0)[0].micro_batches(grpo.needs)
    with pytest.raises(ZeroDivisionError):
        train_step.update(policy, grpo, batches, LR, look=lambda _: 1 / 0)
    assert all(torch.equal(before[name], now) for name, now in weights_of(policy).items())


def test_a_ratio_to_the_engine_needs_no_pass_of_the_trainer(make_policy, make_reference) -> None:
    """The engine's log-probabilities in the place of the old ones, against GRPO written a second time."""
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    policy, other = make_policy(trained_config(old_logprobs="engine")), IndependentGrpo(make_reference(), SETTINGS)
    grpo, groups = objective_of(policy), rollout(0)
    assert (grpo.needs.old_logprobs, grpo.needs.engine_logprobs) == (False, True)
    values = advantages([[sample.reward for sample in group.trajectories] for group in groups])
    first = make_updates(policy.config, grpo, groups, dp_rank=0)[0]
    engine = [torch.tensor(sample.logprobs) for sample in first.trajectories]
    said = train_step.update(policy, grpo, first.micro_batches(grpo.needs), LR)
    expected = other.update(first.trajectories, engine, values[:SAMPLES_PER_UPDATE], LR)
    assert said.named.keys() == expected.keys() - {
        "loss",
        "grad_norm",
        "num_tokens",
        "first_update_ratio_max_abs_deviation",
    }
    for name, value in said.named.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name
    assert said.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert abs(said.named["importance_ratio_mean"] - 1) > 0.1, "the engine is another policy here"


def test_a_stage_that_computes_no_loss_adds_zeros(policy) -> None:
    from posttrain.rl.megatron_backend.train_step import _add_up, _names

    assert _add_up([], objective()) == dict.fromkeys(_names(objective()), 0.0)


def test_given_responses_are_learned_without_rollout_engine_or_old_log_probabilities(make_policy, make_reference):
    from posttrain.rl.algorithm.sft import SupervisedFineTuning
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    policy, other = make_policy(trained_config()), IndependentGrpo(make_reference(), SETTINGS)
    given = [
        TrajectoryGroup(group.prompt, (dataclasses.replace(sample, logprobs=()),))
        for group in rollout(0)
        for sample in group.trajectories
    ]
    sft = SupervisedFineTuning("token_mean", longest=32)
    first, _ = make_updates(policy.config, sft, given, dp_rank=0)
    assert first.has_signal
    with torch.no_grad():
        rows = [other.logprobs(sample.tokens, sample.loss_mask) for sample in first.trajectories]
    said = [train_step.update(policy, sft, first.micro_batches(sft.needs), LR) for _ in range(5)]
    assert said[0].loss == pytest.approx(-torch.cat(rows).mean().item(), rel=1e-5)
    assert said[0].num_tokens == sum(map(len, rows))
    losses = [one.loss for one in said]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert all((sorted(one.named), one.outcome) == (["entropy", "logprob_mean"], "applied") for one in said)


def test_an_update_without_signal_moves_no_weight_but_by_choice(make_policy) -> None:
    """Momentum and weight decay would: the update before it had a signal."""
    from posttrain.rl.megatron_backend import train_step

    policy = make_policy(trained_config())
    first, second = updates_of(policy, 0)
    assert first.has_signal
    assert apply(policy, first, LR).outcome == "applied"
    silent = dataclasses.replace(second, advantages=torch.zeros_like(second.advantages))
    assert not silent.has_signal
    before = weights_of(policy)
    grpo = objective_of(policy)
    said = train_step.update(policy, grpo, silent.micro_batches(grpo.needs), LR, has_signal=False)
    assert (said.outcome, said.loss, said.grad_norm) == ("no_signal", 0.0, 0.0)
    assert said.named["importance_ratio_mean"] != 1.0, "it is measured all the same"
    after = weights_of(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert apply(policy, silent, LR).outcome == "applied"
    moved = weights_of(policy)
    assert any(not torch.equal(moved[name], before[name]) for name in before)


def test_a_batch_without_old_log_probabilities_and_a_policy_without_optimizer_are_not_trained(make_policy) -> None:
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    policy = make_policy(trained_config())
    update = make_updates(policy.config, objective_of(policy), rollout(0), dp_rank=0)[0]
    with pytest.raises(AssertionError, match="old log-probabilities"):
        apply(policy, update, LR)
    with pytest.raises(AssertionError, match="cannot be trained"):
        train_step.update(dataclasses.replace(policy, optimizer=None), objective(), [], LR)


@pytest.fixture
def disturbed(make_policy):
    """A policy, the first update that it would make, and the same update with a loss that is infinite.

    A token that is to become unlikely is e^95 times as likely as before: its log-probability is finite, its ratio is
    not.
    """
    policy = make_policy(trained_config())
    good = updates_of(policy, 0)[0].micro_batches(objective_of(policy).needs)
    bad = list(good)
    tokens = bad[1].tokens
    place = int((tokens.advantages < 0).nonzero()[0])
    old = tokens.old_logprobs.clone()
    old[place] -= 95
    bad[1] = dataclasses.replace(bad[1], tokens=dataclasses.replace(tokens, old_logprobs=old))
    return policy, good, bad


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(disturbed) -> None:
    from posttrain.rl.megatron_backend import train_step

    policy, good, bad = disturbed
    policy.wrapped[0].eval()
    before = weights_of(policy)
    with pytest.raises(RuntimeError, match=r"^1 non-finite values in log-probabilities or gradients; the weights are"):
        train_step.update(policy, objective_of(policy), bad, LR)
    after = weights_of(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert policy.wrapped[0].training, "every pass recomputes as training does"
    # A weight that is no number: every log-probability is none, and no gradient.
    weight = policy.chunks[0].output_layer.weight
    weight.data[7, 3] = math.nan
    num_tokens = sum(int(batch.packed.loss_mask.sum()) for batch in good)
    with pytest.raises(RuntimeError, match=f"^{num_tokens + 1} non-finite values"):
        train_step.update(policy, objective_of(policy), good, LR)


def test_a_skipped_step_leaves_no_trace(disturbed, make_policy) -> None:
    from posttrain.rl.megatron_backend import train_step

    policy, good, bad = disturbed
    fresh = make_policy(trained_config())
    policy = dataclasses.replace(policy, config=trained_config(non_finite="skip_step"))
    skipped = train_step.update(policy, objective_of(policy), bad, LR)
    assert (skipped.outcome, skipped.grad_norm) == ("non_finite", 0.0)
    assert skipped.loss == math.inf
    assert skipped.num_tokens == sum(int(batch.packed.loss_mask.sum()) for batch in good)
    both = [train_step.update(one, objective_of(one), good, LR) for one in (policy, fresh)]
    assert both[0] == both[1]
    after, expected = weights_of(policy), weights_of(fresh)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_recomputation_changes_no_bit(make_policy) -> None:
    """GPUs recompute every layer, the demo on a CPU none: index choices and router are the same the second time."""
    trained = {}
    for granularity in ("full", "none"):
        config = trained_config()
        trainer = dataclasses.replace(config.trainer, recompute_granularity=granularity)
        policy = make_policy(dataclasses.replace(config, trainer=trainer))
        assert policy.chunks[0].config.recompute_granularity == {"full": "full", "none": None}[granularity]
        said = [apply(policy, update, LR) for update in updates_of(policy, 0)]
        trained[granularity] = (said, weights_of(policy))
    (full, recomputed), (none, kept) = trained.values()
    assert full == none
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)

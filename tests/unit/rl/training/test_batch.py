import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tests.support.algorithms import objective
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.config.derived import data_parallel_size
from posttrain.plan.resolve import resolve
from posttrain.rl.batching.packed_batch import build_packed_batch
from posttrain.rl.training.batch import Update, make_updates, sample_costs
from posttrain.types import Prompt, Trajectory, TrajectoryGroup, VersionSpan

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def lengths_of_math_responses(count, seed):
    """Log-normal and cut at the recipe's limits, as lengths of answers to mathematical problems are."""
    source = random.Random(seed)
    return [min(max(int(source.lognormvariate(8.5, 1.0)), 64), 32_000) for _ in range(count)]


def groups_of(config, lengths):
    size, numbers = config.rollout.num_samples_per_prompt, iter(range(len(lengths)))
    groups = []
    for prompt in range(config.rollout.rollout_batch_size):
        samples = [_sample(prompt, place, lengths[next(numbers)]) for place in range(size)]
        groups.append(TrajectoryGroup(Prompt(prompt, (), ""), tuple(samples)))
    return groups


def _sample(prompt, place, length):
    return Trajectory.of_response(
        (1,) * 100, (2,) * length, (-1.0,) * length, 0, prompt_id=prompt, sample_index=place, reward=float(place % 2)
    )


@pytest.fixture(scope="module")
def recipe():
    return resolve({"model": "glm5", "site": "local", "set": PUBLISHED_LAYOUT}, CONFIG_DIR).config


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_the_recipe_hold_little_padding(recipe, seed):
    """TP4 and CP2: every sequence to a multiple of 4, every row of 8, and a row of 8 where a rank has nothing to do."""
    lengths = lengths_of_math_responses(64, seed)
    ranks = range(data_parallel_size(recipe))
    updates = [make_updates(recipe, objective(), groups_of(recipe, lengths), rank)[0] for rank in ranks]
    rows = [batch for update in updates for batch in update.batches]
    padding, tokens = sum(row.num_padding for row in rows), sum(len(row.tokens) for row in rows)
    assert tokens - padding == sum(lengths) + 100 * len(lengths)
    assert 0 < padding < 0.03 * tokens
    assert all(len(row.tokens) % 8 == 0 for row in rows)
    assert all(length % 4 == 0 for row in rows for length in row.lengths)


def test_ranks_without_samples_run_padding_and_the_loss_does_not_count_it(recipe):
    config = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, global_batch_size=2))
    groups = groups_of(config, [300] * 64)
    updates = [make_updates(config, objective("bnpo"), groups, rank)[0] for rank in range(data_parallel_size(config))]
    assert [[batch.trajectory_indices for batch in update.batches] for update in updates] == [
        [(0,)],
        [(1,)],
        [()],
        [()],
    ]
    assert [len(update.batches[0].tokens) for update in updates] == [400, 400, 8, 8]
    # Two micro-batches of 300 tokens each, not four.
    assert updates[3].weights.tolist() == pytest.approx([1 / 600] * 2)


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo"])
def test_segments_weigh_as_one_episode(recipe, preset):
    """An episode of two segments has the weight of one with the same sampled tokens, whatever its number of rows."""
    groups = groups_of(recipe, [300] * 64)
    one = groups[0].trajectories[1]
    asked, sampled = one.tokens[:100], one.tokens[100:]
    tokens, mask = (*asked, *sampled[:120], *asked, *sampled[120:]), (0,) * 100 + (1,) * 120 + (0,) * 100 + (1,) * 180
    cut = dataclasses.replace(one, tokens=tokens, loss_mask=mask, segment_lengths=(220, 280))
    changed = [
        dataclasses.replace(groups[0], trajectories=(groups[0].trajectories[0], cut, *groups[0].trajectories[2:])),
        *groups[1:],
    ]
    (whole,), (parts,) = ([*make_updates(recipe, objective(preset), some, 0)] for some in (groups, changed))
    assert len(parts.trajectories) == len(whole.trajectories) + 1
    assert [segment.num_tokens for segment in parts.trajectories[1:3]] == [220, 280]
    assert parts.advantages.tolist() == [*whole.advantages[:2].tolist(), *whole.advantages[1:].tolist()]
    assert parts.weights.tolist() == [*whole.weights[:2].tolist(), *whole.weights[1:].tolist()]
    updates = [make_updates(recipe, objective(preset), changed, rank)[0] for rank in range(data_parallel_size(recipe))]
    rows = [(batch, update) for update in updates for batch in update.batches]
    assert sum(int(batch.loss_mask.sum()) for batch, _ in rows) == 64 * 300
    indices = sorted(index for batch, _ in rows for index in batch.trajectory_indices)
    assert indices == list(range(65))


def test_truncated_responses_are_left_out_of_the_loss(recipe):
    """Their tokens have no weight, the others share theirs; an update in which none counts has no signal."""
    algorithm = dataclasses.replace(recipe.algorithm, mask_truncated=True)
    config = dataclasses.replace(recipe, algorithm=algorithm)
    first, second, *others = groups_of(config, [300] * 64)

    def cut(group, indices):
        cut_ones = [
            dataclasses.replace(one, finish_reason="length" if i in indices else "stop")
            for i, one in enumerate(group.trajectories)
        ]
        return dataclasses.replace(group, trajectories=tuple(cut_ones))

    groups = [cut(first, range(8)), cut(second, [0, 5]), *others]
    (update,) = make_updates(config, objective("dapo"), groups, 0)
    assert update.weights.tolist() == pytest.approx([0] * 8 + [0] + [1 / 16200] * 4 + [0] + [1 / 16200] * 50)
    assert update.has_signal
    (plain,) = make_updates(recipe, objective("dapo"), groups, 0)
    assert plain.weights.tolist() == pytest.approx([1 / 19200] * 64)
    (silent,) = make_updates(config, objective("dapo"), [cut(group, range(8)) for group in groups], 0)
    assert silent.advantages.any()
    assert not silent.has_signal


def test_versions_and_engine_logprobs_are_where_the_model_sampled(recipe):
    """The second trajectory has two turns, the second of them sampled from two versions; the third tells no version."""
    spans = (VersionSpan(3, 2), VersionSpan(None, 1), VersionSpan(4, 1))
    turns = Trajectory(0, 1, (5, 9, 7, 1, 4, 3, 3), (0, 0, 1, 1, 0, 1, 1), (-1.0, -2.0, -3.0, -4.0), spans, "stop", 0.0)
    offline = Trajectory.of_response((5, 9), (7, 1), prompt_id=0, sample_index=2, reward=1.0)
    ordinary = Trajectory.of_response((5,), (7, 1), (-5.0, -6.0), 2, prompt_id=0, reward=1.0)
    update = make_update([ordinary, turns, offline])
    batch = build_packed_batch(update.trajectories, [1, 0, 2], sequence_multiple_of=8)
    unknown, none = [-1] * 8, [0.0] * 8
    versions = [[-1, 3, 3, -1, -1, 4, -1, -1], [2, 2, *unknown[:6]], unknown]
    assert update.versions(batch).tolist() == [version for sequence in versions for version in sequence]
    assert update.versions(batch).dtype == torch.int64
    update = make_update([ordinary, turns])
    batch = build_packed_batch(update.trajectories, [1, 0], sequence_multiple_of=8)
    logprobs = [[0, -1.0, -2.0, 0, -3.0, -4.0, 0, 0], [-5.0, -6.0, *none[:6]]]
    assert update._engine_logprobs(batch).tolist() == [value for sequence in logprobs for value in sequence]
    assert update.versions(build_packed_batch(update.trajectories, [], multiple_of=4)).tolist() == [-1] * 4


def make_update(trajectories):
    return Update(tuple(trajectories), (), 0, torch.zeros(len(trajectories)), torch.zeros(len(trajectories)))


def test_costs_are_those_of_what_is_multiplied(recipe):
    """GLM-5's attention multiplies a query with all keys before it, kept or not: four times as long costs more."""
    one, four = sample_costs(recipe, [8192, 32768])
    assert 6 < four / one < 16
    assert sample_costs(recipe, [8192, 32768, 8192]) == [one, four, one]


def test_every_sample_is_in_one_row_of_one_rank_and_no_row_exceeds_the_budget(recipe):
    groups = groups_of(recipe, lengths_of_math_responses(64, seed=7))
    updates = [make_updates(recipe, objective(), groups, rank)[0] for rank in range(data_parallel_size(recipe))]
    seen = [index for update in updates for batch in update.batches for index in batch.trajectory_indices]
    assert sorted(seen) == list(range(64))
    budget = recipe.trainer.max_tokens_per_gpu * recipe.parallel.context_parallel_size
    assert all(len(batch.tokens) <= budget for update in updates for batch in update.batches)
    assert len({len(update.batches) for update in updates}) == 1
    assert {update.num_micro_batches for update in updates} == {sum(len(update.batches) for update in updates)}

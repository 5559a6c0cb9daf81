import random
from pathlib import Path

import pytest
from tests.support.algorithms import objective

from posttrain.config.derived import data_parallel_size
from posttrain.planner.resolve import resolve
from posttrain.training.batch import make_updates
from posttrain.types import Prompt, Sample, SampleGroup

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def lengths_of_math_responses(count, seed):
    """Log-normal and cut at the recipe's limits, as lengths of answers to mathematical problems are."""
    source = random.Random(seed)
    return [min(max(int(source.lognormvariate(8.5, 1.0)), 64), 32_000) for _ in range(count)]


def groups_of(config, lengths):
    size, numbers = config.rollout.num_samples_per_prompt, iter(range(len(lengths)))
    groups = []
    for prompt in range(config.rollout.rollout_batch_size):
        samples = [_sample(prompt, place, lengths[next(numbers)]) for place in range(size)]
        groups.append(SampleGroup(Prompt(prompt, (), ""), tuple(samples)))
    return groups


def _sample(prompt, place, length):
    return Sample(prompt, place, (1,) * 100, (2,) * length, (-1.0,) * length, "stop", 0, float(place % 2))


@pytest.fixture(scope="module")
def recipe():
    return resolve({"model": "glm5", "site": "local"}, CONFIG_DIR).config


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_the_recipe_hold_little_padding(recipe, seed):
    lengths = lengths_of_math_responses(64, seed)
    ranks = range(data_parallel_size(recipe))
    updates = [make_updates(recipe, objective(), groups_of(recipe, lengths), rank)[0] for rank in ranks]
    rows = [batch for update in updates for batch in update.batches]
    padding, tokens = sum(row.num_padding for row in rows), sum(len(row.tokens) for row in rows)
    assert tokens - padding == sum(lengths) + 100 * len(lengths)
    assert padding <= 0.05 * tokens
    # Rows padded to tensor x context ranks x 4096 tokens, as the launcher of today pads them, on the same rows.
    multiple = 4 * 2 * 4096
    padded = sum(-(-(len(row.tokens) - row.num_padding) // multiple) * multiple for row in rows)
    assert padded - (tokens - padding) > 10 * padding


def test_every_sample_is_in_one_row_of_one_rank_and_no_row_exceeds_the_budget(recipe):
    groups = groups_of(recipe, lengths_of_math_responses(64, seed=7))
    updates = [make_updates(recipe, objective(), groups, rank)[0] for rank in range(data_parallel_size(recipe))]
    seen = [index for update in updates for batch in update.batches for index in batch.sample_indices]
    assert sorted(seen) == list(range(64))
    budget = recipe.trainer.max_tokens_per_gpu * recipe.parallel.context_parallel_size
    assert all(len(batch.tokens) <= budget for update in updates for batch in update.batches)
    assert len({len(update.batches) for update in updates}) == 1
    assert {update.num_micro_batches for update in updates} == {sum(len(update.batches) for update in updates)}

import pytest
from tests.support.megatron_single import CONFIG_DIR

from posttrain.config.derived import micro_batch_multiple
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.activations import fullest_micro_batch
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.rl.training.batch import plan_rows, row_multiples
from posttrain_rehearsal.samples import MadeUpRollouts, shortened

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "nodes").glob("*.yaml"))


def test_the_fullest_rows_come_when_the_optimizer_has_its_state():
    """Its first update makes that; a peak before it would be too small."""
    config = shortened(resolve({"site": "local", "model": "qwen3_4b"}, CONFIG_DIR).config)
    source, fullest = MadeUpRollouts(config), fullest_micro_batch(config, ASSUMPTIONS)
    first, second = ([s.num_tokens for g in source.of_step(step).groups for s in g.trajectories] for step in (1, 2))
    assert {*second} == {fullest.tokens // fullest.num_sequences}
    assert max(first) < min(second)
    assert sum(first) < sum(second)


@pytest.mark.parametrize("recipe", [*RECIPES, "tiny_1"])
def test_rows_of_an_update_differ_on_every_rank_and_their_number_from_step_to_step(recipe: str) -> None:
    """Messages of another row's length, and a rank that goes by its own rows, are found in such an update alone."""
    model, _, nodes = recipe.rpartition("_")
    on_gpus = {"hardware": "h100"} if model == "tiny" else {}
    config = shortened(resolve({"site": "local", "model": model, "nodes": int(nodes), **on_gpus}, CONFIG_DIR).config)
    source, multiple = MadeUpRollouts(config), row_multiples(config)[0]
    first, second = (
        [[sum(samples[place].num_tokens for place in row) for row in rank] for rank in plan]
        for samples in ([s for g in source.of_step(step).groups for s in g.trajectories] for step in (1, 2))
        for plan in [plan_rows(config, [sample.num_tokens for sample in samples])]
    )
    assert all(len({-(-tokens // multiple) for tokens in rank}) > 1 for rank in first)
    assert len(first) == 1 or first[0] != first[1]
    # Interleaved stages take rows a few at a time, which rounds both numbers up.
    may_be_equal = micro_batch_multiple(config) > 1
    assert {len(rank) for rank in first} <= {*range(2, len(second[0]) + may_be_equal)}

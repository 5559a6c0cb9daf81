from tests.support.megatron_single import CONFIG_DIR

from posttrain.planner.resolve import resolve
from posttrain.planner.sizing.activations import fullest_micro_batch
from posttrain.planner.sizing.assumptions import ASSUMPTIONS
from posttrain.rehearsal.samples import MadeUpRollouts, shortened


def test_the_fullest_rows_come_when_the_optimizer_has_its_state():
    """Its first update makes that; a peak before it would be too small."""
    config = shortened(resolve({"site": "local", "model": "qwen3_4b"}, CONFIG_DIR).config)
    source, fullest = MadeUpRollouts(config), fullest_micro_batch(config, ASSUMPTIONS)
    first, second = ([s.num_tokens for g in source.of_step(step).groups for s in g.samples] for step in (1, 2))
    assert {*second} == {fullest.tokens // fullest.num_sequences}
    assert max(first) < min(second)
    assert sum(first) < sum(second)

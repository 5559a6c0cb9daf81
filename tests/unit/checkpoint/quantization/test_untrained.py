"""What engines that begin empty load of a quantised model: all that the trainer does not send."""

import pytest
from tests.support.tiny_checkpoint import TINY_QWEN3_5, make_random_checkpoint

from posttrain.checkpoint.quantization.quantize import QuantizedUntrained


@pytest.mark.parametrize("drafts", [False, True])
def test_a_vision_tower_always_and_mtp_layers_for_drafts(tmp_path, drafts):
    names = make_random_checkpoint(tmp_path, TINY_QWEN3_5)
    settings = {"format": "fp8", "strategy": "block", "scale": "amax", "drafts": drafts}
    expected = {name for name in names if name.startswith("model.visual.") or (drafts and name.startswith("mtp."))}
    assert {*QuantizedUntrained(tmp_path, settings).names} == expected

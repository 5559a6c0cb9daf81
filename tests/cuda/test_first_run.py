"""What a first run on GPUs meets before any kernel: dispatchers, names of weights, where tensors lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import fake_cuda
from tests.support.megatron_single import CONFIG_DIR

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.planner.resolve import resolve

SCRIPT = Path(__file__).parent / "first_step.py"
ALONE = {"model": "tiny", "hardware": "h100", "set": "parallel.expert_model_parallel_size=1"}
SPREAD = {"model": "tiny", "hardware": "h100", "set": "parallel.expert_model_parallel_size=2 trainer.deepep=false"}


@pytest.mark.faults("cuda")
@pytest.mark.parametrize("choice", [ALONE, SPREAD], ids=["experts of one rank", "experts of two"])
def test_a_first_step_finds_everything_on_the_device(choice: dict[str, str]) -> None:
    found = fake_cuda.run(SCRIPT, json.dumps(choice))
    assert found["devices"] == ["cuda"]
    assert found["experts"] == ["TEGroupedMLP"]
    assert found["norms"] == ["transformer_engine.pytorch.module.rmsnorm"]
    assert found["latent_eps"] == [1e-6]
    assert found["fused"] == [True]
    assert found["extra_states"] > 0, "or weights are told from them without proof"
    assert found["dispatchers"] == ["MoEAlltoAllTokenDispatcher"]
    names = set(expected_tensors(resolve({"site": "local", **choice}, CONFIG_DIR).config.model.architecture))
    mine = {name for name in names if ".layers.4." not in name}  # the MTP layer is not trained
    assert set(found["names"]) == mine
    assert (found["gradient"], found["sums"]) == ("cuda", "cuda")

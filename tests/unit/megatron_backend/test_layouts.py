"""Two ranks compute what one rank computes: tensor, expert, pipeline and data parallelism over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.megatron_single import run_ranks

ROOT = Path(__file__).parents[3]
LAYOUTS = {
    "one_rank": {},
    "tensor": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "tensor_and_expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "data": {},
}


@pytest.fixture(scope="module")
def run_layout(checkpoint, tmp_path_factory: pytest.TempPathFactory):
    finished: dict[str, dict] = {}

    def run(name: str) -> dict:
        if name not in finished:
            ranks = 1 if name == "one_rank" else 2
            folder = tmp_path_factory.mktemp(name) / "state"
            request = {
                "root": str(ROOT),
                "checkpoint": str(checkpoint[0]),
                "folder": str(folder),
                "parallel": LAYOUTS[name],
                "ranks": ranks,
            }
            outputs = run_ranks(ROOT / "tests/megatron_layouts.py", ranks, json.dumps(request))
            finished[name] = json.loads(outputs[0].strip().splitlines()[-1])
        return finished[name]

    return run


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one_rank"])
def test_two_ranks_equal_one(run_layout, name: str) -> None:
    one, two = run_layout("one_rank"), run_layout(name)
    assert one["logprobs"].keys() == two["logprobs"].keys()
    for index, values in one["logprobs"].items():
        assert values == pytest.approx(two["logprobs"][index], rel=1e-6, abs=1e-6)
    for key in ("loss", "grad_norm", "importance_ratio_mean"):
        assert two["statistics"][key] == pytest.approx(one["statistics"][key], rel=1e-6, abs=1e-7), key
    assert two["statistics"]["num_tokens"] == one["statistics"]["num_tokens"]
    assert two["second_grad_norm"] == pytest.approx(one["second_grad_norm"], rel=1e-5)
    for tensor, (_, norm) in one["after"].items():
        assert two["after"][tensor][1] == pytest.approx(norm, rel=1e-6), tensor


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_weights_and_state_round_trip(run_layout, name: str) -> None:
    result = run_layout(name)
    assert result["round_trip_exact"], "gathering what was put in must give the same bits"
    assert result["restored_step"] == 1
    assert result["restored_equal"], "a saved and loaded state must give the same bits"


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_first_ratio_is_exactly_one(run_layout, name: str) -> None:
    assert run_layout(name)["statistics"]["ratio_max_abs_deviation"] == 0.0

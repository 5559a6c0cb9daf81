"""Four ranks of which some share sequences compute what one rank computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import context_updates
from tests.support.megatron_single import initialize_single_rank, run_ranks

ROOT = Path(__file__).parents[4]
PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}
LAYOUTS = {
    "context and data": {"context_parallel_size": 2},
    "context and tensor": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    "context and pipeline": {"context_parallel_size": 2, **PIPELINE},
    "context and expert": {"context_parallel_size": 2, "expert_model_parallel_size": 2},
    "context": {"context_parallel_size": 4},
}


@pytest.fixture(scope="module")
def one(checkpoint) -> dict[str, dict]:
    config = context_updates.small_batches({}, 1)
    initialize_single_rank(config)
    return json.loads(json.dumps(context_updates.updated(config, checkpoint[0])))


def updates_of(checkpoint, *names: str, by_kernel: bool = False) -> dict[str, dict]:
    layouts = {name: LAYOUTS[name] for name in names}
    request = {
        "root": str(ROOT),
        "checkpoint": str(checkpoint[0]),
        "ranks": 4,
        "layouts": layouts,
        "by_kernel": by_kernel,
    }
    outputs = run_ranks(ROOT / "tests/support/context_updates.py", 4, json.dumps(request), timeout=500)
    return json.loads(outputs[0].splitlines()[-1])


def check(one: dict, four: dict) -> None:
    assert four["logprobs"].keys() == one["logprobs"].keys()
    for sample, values in one["logprobs"].items():
        assert four["logprobs"][sample] == pytest.approx(values, rel=1e-6, abs=1e-6), sample
    assert one["first"]["num_tokens"] == 3 * (1 + 1 + 28 + 22 + 4 + 17)
    for key, value in one["first"].items():
        assert four["first"][key] == pytest.approx(value, rel=1e-6, abs=1e-7), key
    assert four["first"]["first_update_ratio_max_abs_deviation"] == 0
    assert one["last"]["grad_norm"] > 0.1
    for key, value in one["last"].items():
        assert four["last"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_updates_are_those_of_one_rank(one, checkpoint) -> None:
    """Sequences shorter than a token for each chunk, of odd lengths, and a rank that has no sample."""
    name = "context and data"
    four = updates_of(checkpoint, name)[name]
    assert (one["shortest"], four["shortest"], four["empty"]) == (2, 4, 1)
    check(one, four)


@pytest.mark.faults("slow")
def test_updates_in_the_space_of_latents_are_those_of_one_rank(one, checkpoint) -> None:
    """One rank attends under a mask, the four by a kernel that reads chosen keys, whose gradients they add up."""
    name = "context and tensor"
    check(one, updates_of(checkpoint, name, by_kernel=True)[name])


@pytest.mark.faults("slow")
def test_updates_in_products_of_layouts_are_those_of_one_rank(one, checkpoint) -> None:
    names = [name for name in LAYOUTS if name != "context and data"]
    for name, four in updates_of(checkpoint, *names).items():
        check(one, four)
        assert four["shortest"] == (8 if name == "context" else 4)

"""Four ranks of which some share sequences compute what one rank computes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tests.support import context_updates
from tests.support.megatron_single import initialize_single_rank, run_ranks, test_config
from tests.support.tiny_checkpoint import FAMILIES as SMALL
from tests.support.tiny_checkpoint import TINY_MOONLIGHT, TINY_YARN, TRAINED, make_random_checkpoint
from tests.unit.megatron_backend.test_family_parity import gradients

ROOT = Path(__file__).parents[3]
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


def updates_of(checkpoint, *names: str) -> dict[str, dict]:
    layouts = {name: LAYOUTS[name] for name in names}
    request = {"root": str(ROOT), "checkpoint": str(checkpoint[0]), "ranks": 4, "layouts": layouts}
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
def test_updates_in_products_of_layouts_are_those_of_one_rank(one, checkpoint) -> None:
    names = [name for name in LAYOUTS if name != "context and data"]
    for name, four in updates_of(checkpoint, *names).items():
        check(one, four)
        assert four["shortest"] == (8 if name == "context" else 4)


@pytest.mark.faults("slow")
def test_every_gradient_is_that_of_one_rank(sequences, tmp_path) -> None:
    from posttrain.megatron_backend.model import build_policy
    from posttrain.megatron_backend.weights import HubWeights

    families = {
        "sparse": TRAINED,
        "qwen3": SMALL["qwen3"],
        "qwen3_moe": SMALL["qwen3_moe"],
        "moonlight": TINY_MOONLIGHT,
        "yarn": dataclasses.replace(TINY_YARN, v_head_dim=12, num_experts_per_tok=4),
    }
    for family, arch in families.items():
        tensors = make_random_checkpoint(tmp_path / family, arch, seed=2)
        config = test_config(arch)
        initialize_single_rank(config)
        policy = build_policy(config)
        weights = HubWeights(policy.model, arch)
        weights.transform(lambda name, _, tensors=tensors: tensors[name].float())
        torch.save(gradients(policy, weights, sequences), tmp_path / f"{family}.pt")
    torch.save(sequences, tmp_path / "sequences.pt")
    architectures = {family: dataclasses.asdict(arch) for family, arch in families.items()}
    layouts = {name: layout for name, layout in LAYOUTS.items() if name != "context and expert"}
    layouts |= {"expert": LAYOUTS["context and expert"]}  # dense families are left out by this name
    request = {"root": str(ROOT), "folder": str(tmp_path), "architectures": architectures, "layouts": layouts}
    outputs = run_ranks(ROOT / "tests/support/family_gradients.py", 4, json.dumps(request), timeout=900)
    found = json.loads(outputs[0].splitlines()[-1])
    assert len(found) == len(families) * len(layouts) - 1
    assert {case: off for case, off in found.items() if not off[1] <= 2e-6} == {}

"""Passes of Qwen3.5 in the trainer: recomputed layers and modules, and experts that an engine chose."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from tests.support.hub_tensors import fill
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.packed_rows import boundaries, run_packed
from tests.support.tiny_checkpoint import QWEN3_5, TINY_QWEN3_5_MOE, make_random_checkpoint

from posttrain.rl.megatron_backend.packed import PackedSequences

RECOMPUTED = {
    "none": {"recompute_granularity": "none"},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "shared_experts": {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


@pytest.fixture(scope="module")
def row() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(2, 64, (length,), generator=generator) for length in (70, 9, 131)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3_5")
    return {family: (root / family, make_random_checkpoint(root / family, arch)) for family, arch in QWEN3_5.items()}


def policy_of(checkpoints, family: str, trainer: dict, routing_replay: bool = False):
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights

    config = test_config(QWEN3_5[family])
    config = dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, **trainer),
        algorithm=dataclasses.replace(config.algorithm, routing_replay=routing_replay),
    )
    initialize_single_rank(config)
    policy = build_policy(config)
    fill(HubWeights(policy.chunks, QWEN3_5[family]), checkpoints[family][1])
    return policy


@pytest.fixture(scope="module")
def passed(checkpoints, row):
    """Return what makes a pass: log-probabilities, gradients by name, and what the routers counted."""

    @cache
    def run(family: str, dtype: str, name: str):
        policy = policy_of(checkpoints, family, RECOMPUTED[name] | {"params_dtype": dtype})
        policy.wrapped[0].zero_grad_buffer()
        logprobs = run_packed(policy, row, torch.cat(row).roll(-1)[None])
        logprobs.sum().backward()
        gradients = {name: p.main_grad.clone() for name, p in policy.chunks[0].named_parameters()}
        return logprobs.detach(), gradients, policy.expert_load.take()

    return run


# Norms are recomputed in BF16 alone. A recomputed shared expert changes the order of sums, see below.
CASES = [
    (family, dtype, name)
    for family, dtype in itertools.product(QWEN3_5, ("fp32", "bf16"))
    for name in ("full", "block", {"qwen3_5": "mlp", "qwen3_5_moe": "moe"}[family], *(["norms"] * (dtype == "bf16")))
]


@pytest.mark.parametrize(("family", "dtype", "name"), CASES)
def test_recomputation_changes_no_bit(passed, family: str, dtype: str, name: str) -> None:
    """Nor does it count a token twice at a router."""
    ours, expected = passed(family, dtype, name), passed(family, dtype, "none")
    assert torch.equal(ours[0], expected[0])
    assert [key for key, grad in expected[1].items() if not torch.equal(ours[1][key], grad)] == []
    assert all(grad.abs().max() > 0 for grad in expected[1].values())
    assert ours[2] == expected[2]
    assert bool(ours[2]) == (family == "qwen3_5_moe")


def test_a_recomputed_shared_expert_changes_the_order_of_sums_alone(passed) -> None:
    """The gradient of its input is that of the MLP and of the gate, which a recomputation adds up first."""
    ours, expected = passed("qwen3_5_moe", "fp32", "shared_experts"), passed("qwen3_5_moe", "fp32", "none")
    assert torch.equal(ours[0], expected[0])
    off = {key: float((ours[1][key] - grad).abs().max() / grad.abs().max()) for key, grad in expected[1].items()}
    assert 0 < max(off.values()) <= 3e-6


@pytest.mark.parametrize("family", QWEN3_5)
def test_bf16_is_near_fp32(passed, family: str) -> None:
    """The mean difference of log-probabilities, in nats; BF16 keeps eight bits."""
    found = [passed(family, dtype, "full")[0] for dtype in ("bf16", "fp32")]
    assert 0 < (found[0] - found[1]).abs().mean() <= 0.02


def test_experts_that_an_engine_chose_are_weighed_as_transformers_weighs_its_own(checkpoints, row) -> None:
    from transformers import AutoModelForCausalLM

    arch = TINY_QWEN3_5_MOE
    policy = policy_of(checkpoints, "qwen3_5_moe", {}, routing_replay=True)
    generator = torch.Generator().manual_seed(7)
    order = torch.rand(arch.num_hidden_layers, sum(map(len, row)), arch.n_routed_experts, generator=generator)
    routes = order.argsort(-1)[..., : arch.num_experts_per_tok]
    packed = PackedSequences.from_boundaries(boundaries(row))
    packed.routes = {layer + 1: chosen for layer, chosen in enumerate(routes)}
    with torch.no_grad():
        tokens = torch.cat(row)[None]
        ours = policy.wrapped[0](tokens, packed.position_ids[None], None, packed_seq_params=packed).squeeze()

    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen3_5_moe"][0], dtype=torch.float32, attn_implementation="eager"
    )
    told: dict[int, torch.Tensor] = {}
    for place, layer in enumerate(theirs.model.layers):
        layer.mlp.gate.forward = told_router(layer.mlp.gate, place, told)
    expected, own = [], []
    with torch.no_grad():
        for sequence, *chosen in zip(row, *(r.split([len(s) for s in row]) for r in routes), strict=True):
            told.update(enumerate(chosen))
            expected.append(theirs(sequence[None]).logits[0])
            told.clear()
            own.append(theirs(sequence[None]).logits[0])
    largest = torch.cat(expected).abs().max()
    assert (ours - torch.cat(expected)).abs().max() <= 1e-5 * largest
    assert (ours - torch.cat(own)).abs().max() > 1e-2 * largest, "or routes would make no difference"


def told_router(gate, place: int, told: dict[int, torch.Tensor]):
    """Return a router's forward that chooses what it is told, if it is told, and weighs it as it would its own."""
    original = gate.forward

    def forward(hidden: torch.Tensor):
        if place not in told:
            return original(hidden)
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        weights = logits.softmax(-1).gather(1, told[place])
        return logits, weights / weights.sum(-1, keepdim=True), told[place]

    return forward

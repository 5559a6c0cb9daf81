"""Every family but GLM-5, which has tests of its own, against transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.hub_tensors import fill
from tests.support.independent_grpo import by_hub_name
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.packed_rows import gradients_by_hub_name, run_packed
from tests.support.tiny_checkpoint import FAMILIES as SMALL
from tests.support.tiny_checkpoint import (
    TINY,
    TINY_MOONLIGHT,
    TINY_SHARING,
    TINY_V32,
    TINY_YARN,
    VARIANTS,
    make_random_checkpoint,
)

FAMILIES = {
    **{name: arch for name, arch in SMALL.items() if arch is not TINY},
    "qwen3_untied": VARIANTS["qwen3_untied"],
    "glm4_moe_qk_norm": VARIANTS["glm4_moe_qk_norm"],
    "moonlight": TINY_MOONLIGHT,
    # Keys wider than values; as in DeepSeek-V3 a token chooses twice as many experts as groups.
    "yarn": dataclasses.replace(TINY_YARN, v_head_dim=12, num_experts_per_tok=4),
    # Scores of fewer heads are often all zero, and transformers does not say which of equal ones it keeps.
    "deepseek_v32": dataclasses.replace(TINY_V32, num_experts_per_tok=4, index_n_heads=8),
    "shared_choice": dataclasses.replace(TINY_SHARING, num_hidden_layers=3, index_n_heads=8),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return what makes family -> (checkpoint folder, policy), each once."""
    root, known = tmp_path_factory.mktemp("families"), {}

    def make(family: str):
        if family not in known:
            from posttrain.rl.megatron_backend.model import build_policy
            from posttrain.rl.megatron_backend.weights import HubWeights

            tensors = make_random_checkpoint(root / family, FAMILIES[family], seed=2)
            config = test_config(FAMILIES[family])
            initialize_single_rank(config)
            policy = build_policy(config)
            weights = HubWeights(policy.chunks, config.model.architecture)
            fill(weights, tensors)
            known[family] = root / family, policy, weights
        return known[family]

    return make


def labels_of(sequences) -> torch.Tensor:
    return torch.cat(sequences).roll(-1)


def gradients(policy, weights, sequences) -> dict[str, torch.Tensor]:
    """Return the gradients of the sum of log-probabilities by Hub name."""
    labels = labels_of(sequences)
    policy.wrapped[0].zero_grad_buffer()
    run_packed(policy, sequences, labels[None]).sum().backward()
    return gradients_by_hub_name(policy, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_does(made, sequences, family) -> None:
    from transformers import AutoModelForCausalLM

    folder, policy, weights = made(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    with torch.no_grad():
        logits = run_packed(policy, sequences)
        separate = torch.cat([run_packed(policy, [sequence]) for sequence in sequences])
    largest = expected.abs().max()
    assert (logits - expected).abs().max() <= 1e-5 * largest
    assert (logits - separate).abs().max() <= 1e-5 * largest
    assert largest > 0.5, "logits near zero would agree by themselves"

    torch.log_softmax(expected, -1).gather(1, labels_of(sequences)[:, None]).sum().backward()
    given = ((name, p.grad) for name, p in reference.named_parameters() if p.grad is not None)
    theirs = dict(named for name, grad in given for named in by_hub_name(name, grad))
    ours = gradients(policy, weights, sequences)
    frozen = {name for name in ours if name.endswith("e_score_correction_bias") or ".indexer." in name}
    assert set(theirs) == set(ours) - frozen
    wrong = {name: float((ours[name] - g).abs().max() / g.abs().max()) for name, g in theirs.items()}
    assert {name: off for name, off in wrong.items() if not off <= 1e-5} == {}

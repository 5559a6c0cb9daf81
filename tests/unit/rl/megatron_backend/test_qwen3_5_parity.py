"""Qwen3.5, dense and with experts, against transformers and its twin in FP64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.support.double_twin import double_twin
from tests.support.hub_tensors import fill
from tests.support.independent_grpo import by_hub_name
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.packed_rows import gradients_by_hub_name, run_packed
from tests.support.tiny_checkpoint import QWEN3_5, make_random_checkpoint

# More than two chunks of the delta rule, exactly one, and less than the convolution's width.
LENGTHS = (35, 150, 2, 64, 7)


@pytest.fixture(scope="module", params=QWEN3_5)
def model(request, tmp_path_factory):
    """Policy, names and transformers' model of one checkpoint, in which norms, biases and gates are random, too."""
    from transformers import AutoModelForCausalLM

    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights

    folder, arch = tmp_path_factory.mktemp(request.param), QWEN3_5[request.param]
    tensors = make_random_checkpoint(folder, arch, seed=2)
    config = test_config(arch)
    initialize_single_rank(config)
    policy = build_policy(config)
    weights = HubWeights(policy.chunks, arch)
    fill(weights, tensors)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return SimpleNamespace(arch=arch, policy=policy, weights=weights, theirs=theirs)


@pytest.fixture(scope="module")
def row() -> list[torch.Tensor]:
    """Without the padding token, 1, whose embedding has no gradient in transformers."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 64, (length,), generator=generator) for length in LENGTHS]


def computed(model: torch.nn.Module, row: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits, sequence by sequence, and its gradients of the log-probabilities' sum."""
    logits = torch.cat([model(sequence[None]).logits[0] for sequence in row])
    labels = torch.cat(row).roll(-1)[:, None]
    torch.log_softmax(logits, -1).gather(1, labels).sum().backward()
    given = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    named = dict(pair for name, grad in given for pair in by_hub_name(name, grad))
    return logits.detach(), {name.replace("model.", "model.language_model.", 1): grad for name, grad in named.items()}


def test_logits_and_gradients_are_as_near_the_truth_as_those_of_transformers(model, row) -> None:
    expected, theirs = computed(model.theirs, row)
    with torch.no_grad():
        logits = run_packed(model.policy, row)
        separate = torch.cat([run_packed(model.policy, [sequence]) for sequence in row])
    largest = expected.abs().max()
    assert largest > 0.5, "logits near zero would agree by themselves"
    assert (logits - expected).abs().max() <= 1e-5 * largest
    assert (logits - separate).abs().max() <= 2e-6 * largest

    true_logits, true = computed(double_twin(model.theirs), row)
    assert (logits - true_logits).abs().max() <= max(2 * (expected - true_logits).abs().max(), 1e-6 * largest)
    model.policy.wrapped[0].zero_grad_buffer()
    run_packed(model.policy, row, torch.cat(row).roll(-1)[None]).sum().backward()
    ours = gradients_by_hub_name(model.policy, model.weights)
    assert set(ours) == set(theirs) == set(true)
    kinds = ("A_log", "dt_bias", "conv1d.weight", "linear_attn.norm.weight", "q_norm.weight")
    assert all(any(name.endswith(kind) for name in true) for kind in kinds)
    off = {name: (error(ours[name], grad), error(theirs[name], grad)) for name, grad in true.items()}
    print("farthest from FP64, ours and theirs:", *sorted(off.items(), key=lambda item: -item[1][0])[:3], sep="\n")
    assert {name: both for name, both in off.items() if not both[0] <= max(2 * both[1], 1e-5)} == {}


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).abs().max() / true.abs().max())

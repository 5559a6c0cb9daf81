"""Convolution and gated norm of a gated delta net against torch's own, in FP64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from posttrain.rl.megatron_backend.gated_delta_net import convolution
from posttrain.rl.megatron_backend.gated_delta_net.convolution import CausalConvolution
from posttrain.rl.megatron_backend.gated_delta_net.gated_norm import GatedRMSNorm

SETTINGS = SimpleNamespace(
    linear_conv_kernel_dim=4, params_dtype=torch.float64, layernorm_epsilon=1e-6, sequence_parallel=True
)
LENGTHS = (1, 2, 7, 3, 20)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_gradients_equal(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert (ours - theirs).abs().max() <= 1e-14 * theirs.abs().max()
    grad = drawn(*ours.shape, seed=9).detach()
    found = zip(*(torch.autograd.grad(output, inputs, grad) for output in (ours, theirs)), strict=True)
    assert max(float((mine - other).abs().max() / other.abs().max()) for mine, other in found) <= 1e-13


# Pieces end within sequences, and in the reach of the next piece's first tokens.
@pytest.mark.parametrize("tokens_at_once", [4096, 5, 1])
def test_the_convolution_sees_nothing_of_earlier_sequences(monkeypatch, tokens_at_once) -> None:
    monkeypatch.setattr(convolution, "TOKENS_AT_ONCE", tokens_at_once)
    module, x = CausalConvolution(SETTINGS, 24), drawn(sum(LENGTHS), 2, 6, seed=1)
    weight = drawn(24, 1, 4, seed=2)
    module.weight.data.copy_(weight)

    def theirs(part: torch.Tensor) -> torch.Tensor:
        padded = F.pad(part.flatten(1).T[None], (3, 0))
        return F.silu(F.conv1d(padded, module.weight[12:], groups=12))[0].T.reshape(part.shape)

    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    output = module(x, positions, slice(12, 24))
    assert_gradients_equal(output, torch.cat([theirs(part) for part in x.split(LENGTHS)]), [x, module.weight])


def test_the_gated_norm() -> None:
    module, x, gate = GatedRMSNorm(SETTINGS, 16), drawn(5, 3, 16, seed=1), drawn(5, 3, 16, seed=2)
    module.weight.data.copy_(drawn(16, seed=3))
    expected = F.rms_norm(x, (16,), module.weight, eps=1e-6) * F.silu(gate)
    assert_gradients_equal(module(x, gate), expected, [x, gate, module.weight])
    assert module.weight.sequence_parallel, "other heads are on other ranks: their gradients are summed"


def test_the_gated_norm_keeps_its_inputs_only() -> None:
    kept: list[torch.Tensor] = []
    x, gate, module = drawn(5, 16, seed=1), drawn(5, 16, seed=2), GatedRMSNorm(SETTINGS, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x, gate)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), gate.data_ptr(), module.weight.data_ptr()}


def test_the_gated_norm_rounds_like_transformers() -> None:
    """BF16 heads and a weight in FP32: the normed heads are rounded, the product once more."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    ours, theirs = GatedRMSNorm(SETTINGS, 16), Qwen3_5RMSNormGated(16, eps=1e-6)
    for module in (ours, theirs):
        module.weight.data = 1 + drawn(16, seed=3).detach().float()
    x, gate = (drawn(50, 3, 16, seed=seed).detach().bfloat16() for seed in (1, 2))
    assert torch.equal(ours(x, gate), theirs(x, gate))

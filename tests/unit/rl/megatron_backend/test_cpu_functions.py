"""Hand-written gradients of a CPU's trainer against those of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from posttrain.rl.megatron_backend.cpu_functions import announce_gradient, embedding, linear, rms_norm


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_norm(dtype: torch.dtype, tolerance: float, is_strided: bool, is_zero_centered: bool) -> None:
    """A strided input is one head of several, as queries and keys are normalised."""

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-5) * (weight + int(is_zero_centered))

    found = []
    for compute in (lambda x, w: rms_norm(x, w, 1e-5, is_zero_centered), theirs):
        rows, weight = leaf(5, 3, 24, dtype=dtype), leaf(16, seed=1, dtype=dtype)
        output = compute(rows[..., :16] if is_strided else rows[..., :16].contiguous(), weight)
        output.backward(leaf(*output.shape, seed=2, dtype=dtype).detach())
        found.append((output, rows.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_norm_keeps_its_input_and_a_number_per_row() -> None:
    kept: list[torch.Tensor] = []
    rows, weight = leaf(5, 16), leaf(16, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(rows, weight, 1e-5)
    others = [tensor for tensor in kept if tensor.data_ptr() not in (rows.data_ptr(), weight.data_ptr())]
    assert [tensor.numel() for tensor in others] == [5]


def buffered(*shape: int) -> torch.Tensor:
    """Return a weight with a buffer that holds gradients of an earlier micro-batch."""
    weight = leaf(*shape)
    weight.main_grad = torch.ones(shape)  # type: ignore[attr-defined]
    return weight


def test_linear_adds_its_gradient_to_the_buffer() -> None:
    weight, plain, x, plain_x = buffered(6, 4), leaf(6, 4), leaf(3, 1, 4, seed=1), leaf(3, 1, 4, seed=1)
    grad = leaf(3, 1, 6, seed=2).detach()
    linear(x, weight).backward(grad)
    F.linear(plain_x, plain).backward(grad)
    assert torch.allclose(weight.main_grad, plain.grad + 1)
    assert torch.allclose(x.grad, plain_x.grad)
    assert weight.grad_added_to_main_grad


def test_embedding_adds_the_gradients_of_its_rows_to_the_buffer() -> None:
    weight, plain, places = buffered(6, 4), leaf(6, 4), torch.tensor([[1, 5, 1]])
    grad = leaf(1, 3, 4, seed=2).detach()
    output = embedding(places, weight)
    assert torch.equal(output, weight[places])
    output.backward(grad)
    F.embedding(places, plain).backward(grad)
    assert torch.allclose(weight.main_grad, plain.grad + 1)


def test_what_announces_a_gradient_takes_no_memory_and_is_not_read() -> None:
    """Megatron adds autograd's gradient of a tied embedding to its buffer unless `zero_out_wgrad` is unset."""
    weight = buffered(6, 4)
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    assert announce_gradient(weight).data_ptr() == weight.data_ptr()
    assert weight.grad_added_to_main_grad
    assert not weight.zero_out_wgrad


def test_a_zero_centered_norm_is_rounded_once() -> None:
    """As in transformers' Qwen3.5: the factor 1 + w, which BF16 cannot hold, is FP32."""
    x, weight = leaf(5, 16, dtype=torch.bfloat16), (leaf(16, seed=1) * 2**-9).bfloat16()
    expected = F.rms_norm(x.double(), (16,), eps=1e-5) * (1 + weight.double())
    assert torch.equal(rms_norm(x, weight, 1e-5, True), expected.bfloat16())

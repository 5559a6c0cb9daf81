"""The gated delta rule in chunks against the recurrence that defines it, in FP64; its memory and its time."""

from __future__ import annotations

import sys
import time
import weakref
from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.rl.megatron_backend.gated_delta_net import delta_rule
from posttrain.rl.megatron_backend.gated_delta_net.chunks import segments_of
from posttrain.rl.megatron_backend.gated_delta_net.delta_rule import gated_delta_rule

MANY = (1, 200, 64, 65, 63, 3, 128, 7, 9, 300, 2)


def inputs(num_tokens: int, heads: int, repeats: int, widths: tuple[int, int], dtype: torch.dtype = torch.float64):
    """Return queries, keys, values, log decays and rates of `heads` key heads with `repeats` value heads each."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(heads, widths[0])] * 2 + [(heads * repeats, widths[1])]
    vectors = [torch.randn(num_tokens, *shape, generator=generator, dtype=dtype) for shape in shapes]
    rates = torch.rand(2, num_tokens, heads * repeats, generator=generator, dtype=dtype)
    return [part.requires_grad_() for part in (*vectors, -2 * rates[0], rates[1].clone())]


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def recurrence(query, key, value, decay, rate) -> torch.Tensor:
    """Return the outputs [T, N, D_v] of one sequence, token by token."""
    repeats = value.shape[1] // key.shape[1]
    query, key = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 1)
        for part in (query, key)
    )
    state, outputs = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]), []
    for q, k, v, g, b in zip(query / key.shape[2] ** 0.5, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        news = b[:, None] * (v - torch.einsum("nkv,nk->nv", state, k))
        state = state + torch.einsum("nk,nv->nkv", k, news)
        outputs.append(torch.einsum("nkv,nk->nv", state, q))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [(1,), (63,), (64,), (65,), (200,), MANY], ids=str)
def test_chunks_compute_the_recurrence_of_each_sequence(lengths) -> None:
    """Nine segments of several steps, too: sequences of a step end one after the other."""
    row = inputs(sum(lengths), 2, 3, (8, 12))
    output = gated_delta_rule(*row, boundaries(lengths))
    expected = torch.cat([recurrence(*parts) for parts in zip(*(part.split(lengths) for part in row), strict=True)])
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    assert (output - expected).abs().max() <= 1e-13 * expected.abs().max()
    ours, theirs = (torch.autograd.grad(made, row, grad) for made in (output, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-13 * max(other.abs().max(), 1e-3)


def test_a_sequence_alone_computes_what_it_does_in_a_row() -> None:
    row = [part.float() for part in inputs(sum(MANY), 2, 2, (16, 16))]
    together = gated_delta_rule(*row, boundaries(MANY))
    apart = [
        gated_delta_rule(*parts, boundaries((len(parts[0]),)))
        for parts in zip(*(p.split(MANY) for p in row), strict=True)
    ]
    assert (together - torch.cat(apart)).abs().max() <= 2e-6 * together.abs().max()


def test_every_token_is_in_one_segment() -> None:
    segments = segments_of(MANY)
    tokens = torch.cat([segment.tokens[segment.is_token] for segment in segments])
    assert tokens.sort().values.tolist() == list(range(sum(MANY)))
    assert all(len(segment.tokens) == sum(segment.steps) <= 8 for segment in segments)


def test_bf16_is_computed_in_fp32() -> None:
    row = [part.detach().bfloat16() for part in inputs(200, 1, 2, (16, 16))]
    row[3] = row[3].float()
    output = gated_delta_rule(*row, boundaries((200,)))
    exact = gated_delta_rule(*(part.double() for part in row), boundaries((200,)))
    assert output.dtype == torch.bfloat16
    # Half a unit in the last of eight bits.
    assert ((output.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


class Live(TorchDispatchMode):
    """Measures the bytes of storages that are alive, those made before aside."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata)
        return made

    def _forget(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


@pytest.mark.parametrize("lengths", [(16384,), (1000,) * 16, (100,) * 160], ids=["one", "long", "short"])
def test_forward_and_backward_need_little_memory_beyond_inputs_outputs_and_gradients(lengths) -> None:
    row = inputs(sum(lengths), 1, 2, (64, 64), torch.float32)
    grad = torch.ones(sum(lengths), 2, 64)
    segments_of(lengths)
    given = sum(part.nbytes for part in row)
    with Live() as live:
        gated_delta_rule(*row, boundaries(lengths)).backward(grad)
    assert given + grad.nbytes + live.peak <= 1.5 * 2 * (given + grad.nbytes)
    assert live.peak >= given + grad.nbytes, "outputs and gradients are measured"


def test_time_grows_with_the_length() -> None:
    """Four times the tokens may take 4.6 times as long; attention would take 16 times."""
    best = {}
    for length in (8192, 32768):
        row, grad, taken = inputs(length, 1, 2, (64, 64), torch.float32), torch.ones(length, 2, 64), []
        for _ in range(3):
            begun = time.process_time()
            gated_delta_rule(*row, boundaries((length,))).backward(grad)
            taken.append(time.process_time() - begun)
        best[length] = min(taken)
    assert best[32768] <= 4.6 * best[8192], best


def test_a_gpu_without_fla_is_told_what_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    delta_rule.load_kernel.cache_clear()
    with pytest.raises(RuntimeError, match="fla-core"):
        delta_rule.load_kernel()

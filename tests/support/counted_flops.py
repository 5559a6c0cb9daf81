"""Floating-point operations that torch counts while a real layer trains on a sequence."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _forward(query, key, value, *_: object, out_shape=None, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


def _backward(grad, query, key, value, *_: object, out_shape=None, **__: object) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


# torch knows the kernels of GPUs alone.
KERNELS_OF_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def layer_flops(layer: torch.nn.Module, hidden_size: int, length: int) -> int:
    """Return the operations of a layer's forward and backward pass on one sequence."""
    from tests.support.megatron_single import accumulate_gradients_apart

    from posttrain.rl.megatron_backend.packed import PackedSequences

    accumulate_gradients_apart(layer)
    row = PackedSequences.from_boundaries(torch.tensor([0, length]).int())
    x = torch.randn(length, 1, hidden_size, generator=torch.Generator().manual_seed(length), requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=KERNELS_OF_A_CPU) as counter:
        layer(x, packed_seq_params=row)[0].sum().backward()
    return counter.get_total_flops()

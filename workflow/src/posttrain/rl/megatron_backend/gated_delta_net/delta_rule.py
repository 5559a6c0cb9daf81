"""The gated delta rule on a packed row: a linear attention whose memory has the size of one matrix per head.

With S_0 = 0 at the start of each sequence, a token with query q, key k, value v, log decay g <= 0 and beta b makes

    S_t = exp(g) S_{t-1} + k (b (v - exp(g) S_{t-1}^T k))^T          S: [D_k, D_v]
    o_t = S_t^T q / sqrt(D_k)

Queries and keys are normalised to length 1 before. On a GPU this is fla-core's Triton kernel; elsewhere `chunks`.

Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from posttrain.rl.megatron_backend.gated_delta_net.chunks import ChunkedRule


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs [T, N, D_v] of a packed row; computed in FP32.

    Args:
        query: [T, G, D_k], not normalised; value head n belongs to key head n // (N / G).
        key: [T, G, D_k], not normalised.
        value: [T, N, D_v].
        decay: [T, N] fp32, logarithm of the decay.
        beta: [T, N], from 0 to 1.
        cu_seqlens: [number of sequences + 1] int32, their starts and the end of the last.

    Raises:
        RuntimeError: The tensors are on a GPU, and fla-core is missing.
    """
    if value.is_cuda:
        batch = (part.unsqueeze(0) for part in (query, key, value, decay, beta))
        output, _ = load_kernel()(*batch, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        return output.squeeze(0)
    lengths = tuple(cu_seqlens.diff().tolist())
    result: torch.Tensor = ChunkedRule.apply(query, key, value, decay, beta, lengths)
    return result


@cache
def load_kernel() -> Callable[..., Any]:
    """Return fla-core's kernel.

    Imported here only: next to a triton without a GPU, its import makes transformers call it on a CPU.

    Raises:
        RuntimeError: It is missing.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except (ImportError, OSError) as error:
        needed = f"gated delta nets on GPUs need the packages fla-core and triton ({error}): pip install fla-core"
        raise RuntimeError(needed) from error
    return chunk_gated_delta_rule  # type: ignore[no-any-return]

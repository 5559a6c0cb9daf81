"""In plain torch what Megatron's kernels of attention to chosen keys compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def reference_kernel(
    query: torch.Tensor, key: torch.Tensor, places: torch.Tensor, scale: float, width: int
) -> torch.Tensor:
    """Return [T, N, width] of queries [T, N, D] and keys [all T, D]; keys are gathered, [T, K, D]."""
    chosen = key[places.clamp_min(0)]
    scores = torch.einsum("tnr,tkr->tnk", query, chosen) * scale
    weights = scores.masked_fill((places < 0)[:, None], float("-inf")).softmax(-1)
    return torch.einsum("tnk,tkr->tnr", weights, chosen[..., :width])


def attend_by(kernel: Any, chunks: Iterable[Any]) -> None:
    """Let a model's sparse layers attend by a kernel."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.kernel = kernel

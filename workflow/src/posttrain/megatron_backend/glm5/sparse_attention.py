"""DeepSeek Sparse Attention in plain torch: index scores, top-k selection, attention over the selected keys.

For query s and key t <= s, with H_i indexer heads of width D:

    score(s, t) = sum_h  w(s, h) * relu(q(s, h) . k(t) / sqrt(D)),     w = weights_proj(x) / sqrt(H_i)

The K keys with the highest scores are kept, and the attention's softmax runs over them alone. With K >= s + 1 all keys
are kept and the result is dense causal attention. relu makes scores of exactly zero common, so ties are decided here:
the lower position wins.

Source: DeepSeek-V3.2 technical report (arXiv 2512.02556), section 2.1, equations 1 and 2; GLM-5 differs in the rotary
layout of the indexer (interleaved, rotary part first). The Hadamard rotation of DeepSeek's kernels is left out: it is
orthogonal and cancels in q . k.

Shapes: B sequences, S longest sequence, C queries of a chunk, N attention heads, K kept keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

# (first query, last query + 1) -> kept keys [B or 1, C, last query + 1] bool
Selector = Callable[[int, int], torch.Tensor]


def index_scores(queries: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """Score every key for every query.

    Args:
        queries: [B, C, H_i, D], any float dtype.
        keys: [B, S, D].
        head_weights: [B, C, H_i] fp32, already scaled by H_i ** -0.5.

    Returns:
        [B, C, S] fp32, before causality is applied.
    """
    dots = torch.einsum("bchd,bsd->bchs", queries.float(), keys.float()) * queries.shape[-1] ** -0.5
    return torch.einsum("bch,bchs->bcs", head_weights.float(), dots.relu())


def select_topk(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Mark the `topk` visible keys with the highest score; of equal scores the lower position wins.

    Args:
        scores: [..., S] fp32.
        visible: [..., S] bool, broadcastable: the keys that a query may see.
        topk: Number of keys to keep.

    Returns:
        [..., S] bool: all visible keys where there are at most `topk`, otherwise exactly `topk`.

    Example:
        Scores (0.5, 0, 0, 0.1), all visible, topk 3: keys 0, 1 and 3 are kept; 1 wins its tie with 2.
    """
    if topk >= scores.shape[-1]:
        return visible.expand(scores.shape)
    masked = scores.masked_fill(~visible, float("-inf"))
    threshold = masked.topk(topk, dim=-1).values[..., -1:]
    above = masked > threshold
    tied = masked == threshold
    places_left = topk - above.sum(dim=-1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=-1) <= places_left))) & visible


def causal_mask(first_query: int, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return [C, S] bool: query `first_query + i` sees the keys up to its own position."""
    positions = torch.arange(first_query, first_query + num_queries, device=device)
    return torch.arange(num_keys, device=device) <= positions[:, None]


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend to the kept keys.

    Args:
        query: [B, C, N, D_qk].
        key: [B, S, N, D_qk].
        value: [B, S, N, D_v].
        keep: [B or 1, C, S] bool; at least one key per query.
        scale: Factor on the dot products.

    Returns:
        [B, C, N, D_v] in the dtype of `value`; the softmax runs in fp32.
    """
    scores = torch.einsum("bcnd,bsnd->bncs", query, key).float() * scale
    weights = scores.masked_fill(~keep.unsqueeze(1), float("-inf")).softmax(dim=-1)
    return torch.einsum("bncs,bsnd->bcnd", weights.to(value.dtype), value)


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    select: Selector,
    scale: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """Run attention for `chunk_tokens` queries at a time, so that scores of [C, S] exist instead of [S, S].

    With several chunks each is recomputed in the backward pass, so that its scores are not kept either.

    Args:
        query: [B, S, N, D_qk].
        key: [B, S, N, D_qk].
        value: [B, S, N, D_v].
        select: Tells which keys each query of a chunk attends to.
        scale: Factor on the dot products.
        chunk_tokens: Queries per chunk, over all sequences together.

    Returns:
        [B, S, N, D_v].
    """
    batch, longest = query.shape[:2]
    step = max(1, chunk_tokens // batch)
    if step >= longest:
        return masked_attention(query, key, value, select(0, longest), scale)
    chunks = [
        checkpoint(
            masked_attention,
            query[:, start : start + step],
            key[:, : start + step],
            value[:, : start + step],
            select(start, min(start + step, longest)),
            scale,
            use_reentrant=False,
        )
        for start in range(0, longest, step)
    ]
    return torch.cat(chunks, dim=1)

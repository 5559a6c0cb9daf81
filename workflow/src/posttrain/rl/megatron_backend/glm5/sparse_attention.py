"""DeepSeek Sparse Attention in plain torch: index scores, top-k selection, attention over the selected keys.

For query s and key t <= s, with H_i indexer heads of width D:

    score(s, t) = sum_h  w(s, h) * relu(q(s, h) . k(t) / sqrt(D)),     w = weights_proj(x) / sqrt(H_i)

The K keys with the highest scores are kept, and the attention softmax runs only over them. With K >= s + 1 all keys are
kept and the result is dense causal attention. relu makes scores of exactly zero common, so ties need a rule: the lower
position wins.

Source: DeepSeek-V3.2 technical report (arXiv 2512.02556), section 2.1, equations 1 and 2; GLM-5 differs in the rotary
layout of the indexer (interleaved, rotary part first). The Hadamard rotation of DeepSeek's kernels is left out: it is
orthogonal and cancels in q . k. In GLM-5.2 a layer without an indexer reuses an earlier layer's selection.

Shapes: B sequences, S longest sequence, C queries per chunk, N attention heads, K kept keys.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

# FP32 scores of a chunk that fit into a core's cache, along with as many for each of some indexer heads.
CACHED_SCORES = 2**18


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
        [..., S] bool: all visible keys if there are at most `topk`, otherwise exactly `topk`.

    Example:
        Scores (0.5, 0, 0, 0.1), all visible, topk 3: keys 0, 1 and 3 are kept; 1 wins its tie with 2.
    """
    if topk >= scores.shape[-1]:
        return visible.expand(scores.shape)
    masked = scores.masked_fill(~visible, float("-inf"))
    threshold = masked.topk(topk, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = masked > threshold
    tied = masked == threshold
    places_left = topk - above.sum(dim=-1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=-1) <= places_left))) & visible


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attend to the kept keys with torch's fused attention, which does not store the score matrix.

    Args:
        query: [B, C, N, D_qk].
        key: [B, S, G, D_qk], where G divides N and each key head serves N / G query heads.
        value: [B, S, G, D_v].
        keep: [B, C, S] bool, at least one key per query; None: causal, so that the last query sees all keys, the
            one before it all but the last, and so on.
        scale: Factor on the dot products; None: 1 / sqrt(D_qk).

    Returns:
        [B, C, N, D_v] in the dtype of `value`; the softmax runs in fp32.
    """
    width, value = value.shape[-1], _as_wide(value, key)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    fused = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    if keep is not None:
        bias = query.new_zeros(keep.shape).masked_fill_(~keep, float("-inf")).unsqueeze(1)
        output = fused(query, key, value, attn_mask=bias)
    elif query.shape[2] == key.shape[2]:
        output = fused(query, key, value, is_causal=True)
    elif query.device.type == "cpu":
        bias = _reversed_causal_bias(query, key.shape[2])
        output = fused(query.flip(2), key, value, attn_mask=bias).flip(2)
    else:
        bias = causal_lower_right(query.shape[2], key.shape[2])
        output = fused(query, key, value, attn_mask=bias)
    return output.transpose(1, 2)[..., :width]


def _as_wide(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return values as wide as keys, which the CPU kernel requires."""
    missing = key.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing > 0 else value


def _reversed_causal_bias(query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return the bias [1, 1, C, S] for the last queries [B, N, C, D] in reversed order, stored as C + S numbers.

    In reversed order each query sees one key fewer than the previous one, so all rows are shifted views of one row.
    torch's `causal_lower_right` would materialise the whole bias on a CPU.
    """
    row = query.new_zeros(num_keys + query.shape[2] - 1)
    row[num_keys:] = float("-inf")
    return row.unfold(0, num_keys, 1)[None, None]


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor | None,
    num_dense: int,
    scale: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """Run attention for a chunk of queries of each sequence at a time, so that masks are [C, S] instead of [S, S].

    Args:
        query: [B, Q, N, D_qk], the last Q queries.
        key: [B, S, N, D_qk].
        value: [B, S, N, D_v].
        places: [B, Q, K], positions of the keys that each query attends to, at least one; -1 stands for none. None: all
            keys before it.
        num_dense: Number of first positions that attend to all keys before them, whatever the scores.
        scale: Factor on the dot products.
        chunk_tokens: Maximum queries per chunk and sequence.

    Returns:
        [B, Q, N, D_v].
    """
    longest, before = key.shape[1], key.shape[1] - query.shape[1]
    if places is None or num_dense >= longest:
        return attend(query, key, value, None, scale)
    # Once for all chunks, whose keys overlap.
    width, value = value.shape[-1], _as_wide(value, key)
    step = queries_at_a_time(longest, chunk_tokens, query.device)
    # A short remainder is not worth a separate call.
    first = num_dense if num_dense - before >= step else before
    parts = []
    if first > before:
        parts.append(attend(query[:, : first - before], key[:, :first], value[:, :first], None, scale))
    for start in range(first, longest, step):
        end = min(start + step, longest)
        chunk = slice(start - before, end - before)
        keep = mask_of_places(places[:, chunk], end)
        parts.append(attend(query[:, chunk], key[:, :end], value[:, :end], keep, scale))
    return torch.cat(parts, dim=1)[..., :width]


def mask_of_places(places: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return [B, Q, S] bool: the keys at `places` [B, Q, K]; -1 stands for none."""
    column = places.long()
    keep = torch.zeros(*places.shape[:2], num_keys + 1, dtype=torch.bool, device=places.device)
    return keep.scatter_(-1, column.masked_fill_(column < 0, num_keys), True)[..., :num_keys]


def queries_at_a_time(longest: int, chunk_tokens: int, device: torch.device) -> int:
    """Return the chunk size in queries; on a CPU its scores must fit into the caches, which saves page faults."""
    return min(chunk_tokens, max(1, CACHED_SCORES // longest)) if device.type == "cpu" else chunk_tokens

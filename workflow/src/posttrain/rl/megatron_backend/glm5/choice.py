"""A choice of keys as places: the positions, in each query's own sequence, of the keys that it attends to.

Places are what ranks gather, what layers share, what a recomputation reads, and what kernels take. A mask over all keys
exists for one chunk of queries at a time.

Shapes: B sequences of a block, Q queries of each, S keys, K index_topk, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from posttrain.rl.megatron_backend.glm5.sparse_attention import index_scores, queries_at_a_time, select_topk

# Queries [B, C, H_i, D], head weights [B, C, H_i], positions [B, C], keys [B, S, D], K, dtype of places -> [B, C, K]
ChooseChunk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.dtype], torch.Tensor]


def places_dtype(longest: int) -> torch.dtype:
    """Return the narrowest type that holds -1 and the positions of a sequence of `longest` tokens."""
    return torch.int16 if longest <= 2**15 else torch.int32


def choose_in_torch(
    queries: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    topk: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the places [B, C, K] of a chunk's keys, from FP32 scores of all heads; see `ChooseChunk`."""
    visible = torch.arange(keys.shape[1], device=keys.device) <= positions[..., None]
    return places_of_mask(select_topk(index_scores(queries, keys, weights), visible, topk), topk, dtype)


@torch.no_grad()
def choose_in_chunks(
    queries: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    stride: int,
    topk: int,
    chunk_tokens: int,
    dtype: torch.dtype,
    choose: ChooseChunk = choose_in_torch,
) -> torch.Tensor:
    """Return the places of the keys that each query attends to; masks are [B, chunk / stride, S].

    Ranks that share a row compute every `stride`-th query of a chunk, so that all score the same keys.

    Args:
        queries: [B, Q, H_i, D], of each sequence every `stride`-th.
        weights: [B, Q, H_i] fp32.
        positions: [B, Q] of the queries in their sequences; query q's is less than `first_position + (q + 1) * stride`.
        keys: [B, S, D].
        first_position: Of the block's first query.
        stride: Queries of all ranks for each of this one.
        topk: K. The first K queries of a sequence attend to all keys before them.
        chunk_tokens: Maximum queries of all ranks per chunk and sequence.
        dtype: Of the result.
        choose: Chooses for a chunk.

    Returns:
        [B, Q, K], ascending; padded with -1.
    """
    longest, num_queries = keys.shape[1], queries.shape[1]
    if longest <= topk:
        return causal_places(positions, topk, dtype)
    step = queries_at_a_time(longest, chunk_tokens, queries.device)
    # A short remainder is not worth a separate call.
    first = (topk - first_position) // stride if topk - first_position >= step else 0
    parts = [causal_places(positions[:, :first], topk, dtype)]
    step = -(-step // stride)
    for start in range(first, num_queries, step):
        chunk = slice(start, start + step)
        end = min(first_position + (start + step) * stride, longest)
        of_chunk = queries[:, chunk], weights[:, chunk], positions[:, chunk]
        parts.append(choose(*of_chunk, keys[:, :end], topk, dtype))
    return torch.cat(parts, dim=1)


def causal_places(positions: torch.Tensor, topk: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the places [B, Q, K] of all keys up to each query's position [B, Q], which is less than K."""
    places = torch.arange(topk, dtype=dtype, device=positions.device)
    return torch.where(places <= positions[..., None], places, -1)


def places_of_mask(keep: torch.Tensor, topk: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the places of kept keys in ascending order.

    Args:
        keep: [B, Q, S] bool, at most `topk` true per query.
        topk: K.
        dtype: Of the result.

    Returns:
        [B, Q, K], padded with -1.

    Example:
        Three keys, of which 0 and 2 are kept, topk 3: (0, 2, -1).
    """
    # Keys that are not kept go to an extra column that is dropped.
    column = (keep.cumsum(-1) - 1).masked_fill_(~keep, topk)
    found = torch.full((*keep.shape[:2], topk + 1), -1, dtype=dtype, device=keep.device)
    places = torch.arange(keep.shape[-1], dtype=dtype, device=keep.device)
    return found.scatter_(-1, column, places.expand(keep.shape))[..., :topk]

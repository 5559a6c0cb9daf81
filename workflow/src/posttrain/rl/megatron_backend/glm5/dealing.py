"""Deals the tokens of a row to tensor-parallel ranks in turn, and gathers what they made of them (`PackedSequences`).

Shapes: T tokens of the row, n ranks. Sequence parallelism has split the row into contiguous shards [T / n, ...].
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@torch.no_grad()
def gather_shards(shard: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return all tokens [T, ...] of the ranks' shards; collective."""
    return _all_gather(shard, num_ranks) if num_ranks > 1 else shard


@torch.no_grad()
def deal(shard: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return this rank's tokens [T / n, ...] of the ranks' shards; collective.

    Example:
        Two ranks, shards (0, 1, 2) and (3, 4, 5): rank 0 gets (0, 2, 4), rank 1 (1, 3, 5).
    """
    if num_ranks == 1:
        return shard
    rank, size = parallel_state.get_tensor_model_parallel_rank(), len(shard)
    sent = [shard[(other - rank * size) % num_ranks :: num_ranks] for other in range(num_ranks)]
    received = [len(range((rank - other * size) % num_ranks, size, num_ranks)) for other in range(num_ranks)]
    dealt = torch.empty_like(shard)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_to_all_single(dealt, torch.cat(sent), received, [len(part) for part in sent], group=group)
    return dealt


@torch.no_grad()
def gather_dealt(dealt: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return the row [T, K] of integers that `deal` has dealt [T / n, K]; collective."""
    if num_ranks == 1:
        return dealt
    # NCCL and gloo have no int16.
    by_rank = _all_gather(dealt.view(torch.uint8), num_ranks).view(dealt.dtype)
    return by_rank.unflatten(0, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)


def _all_gather(own: torch.Tensor, num_ranks: int) -> torch.Tensor:
    gathered = own.new_empty(num_ranks * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return gathered

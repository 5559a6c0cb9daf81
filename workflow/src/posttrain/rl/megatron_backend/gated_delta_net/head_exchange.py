"""Exchange between context-parallel ranks: from all heads of some tokens to some heads of all tokens, and back.

The delta rule goes through a sequence token by token, so a rank that held some tokens would wait for the others. With
some heads of the whole row it does not. Heads are independent, so the result is the same for each number of ranks.

Shapes: T tokens of the row, n context-parallel ranks, T / n tokens of this rank, chosen as `PackedSequences` says.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all

from posttrain.rl.megatron_backend.packed import PackedSequences


def to_heads(own: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
    """Return this rank's share of the channels, for all tokens in the row's order; collective.

    Args:
        own: [T / n, C], all channels of this rank's tokens; rank r gets the r-th of n equal parts.
        sequences: How the row is packed.

    Returns:
        [T, C / n].
    """
    if sequences.order is None:
        return own
    group = parallel_state.get_context_parallel_group()
    by_rank = own.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)
    return all_to_all(group, by_rank).index_select(0, sequences.order)


def to_tokens(heads: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
    """Return all channels [T / n, C] of this rank's tokens, from each rank's share [T, C / n]; collective."""
    if sequences.order is None:
        return heads
    group = parallel_state.get_context_parallel_group()
    received = all_to_all(group, heads.index_select(0, sequences.order.argsort()))
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1)

"""Packs sequences of different length into micro-batches under a token budget, for all data-parallel ranks at once.

First-fit decreasing keeps the budget in every bin and wastes little of it; a sequence over the budget is refused. All
ranks must run the same number of micro-batches, because they meet in collectives: where the number of bins is no
multiple of the ranks, the heaviest bins are split. The result is a function of the lengths alone, so every rank
computes the same plan.

Source: Johnson, Near-optimal bin packing algorithms (1973), first-fit decreasing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from posttrain.errors import ConfigError, Problem


def pack(lengths: Sequence[int], max_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Assign every sequence to one micro-batch of one rank.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Budget of a micro-batch.
        num_ranks: Data-parallel ranks.

    Returns:
        Per rank, the same number of micro-batches; each a list of indices into `lengths`, ascending.

    Raises:
        ConfigError: When a sequence alone exceeds the budget, or there are too few sequences to give every rank the
            same number of micro-batches.

    Example:
        Lengths (5, 5, 5) under a budget of 8 on one rank: three bins, none over 8.
    """
    _refuse_over_long(lengths, max_tokens)
    bins = _first_fit_decreasing(lengths, max_tokens)
    wanted = -(-len(bins) // num_ranks) * num_ranks
    _refuse_too_few(len(lengths), wanted, num_ranks)
    while len(bins) < wanted:
        _split_heaviest(bins, lengths)
    return _balance(bins, lengths, num_ranks)


def _refuse_over_long(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_tokens:
        problem = Problem(
            "trainer.max_tokens_per_gpu",
            str(max_tokens),
            f"at least {longest}, the length of sequence {list(lengths).index(longest)}",
            "raise the budget, or cut prompts and responses (rollout.max_response_tokens)",
        )
        raise ConfigError([problem])


def _refuse_too_few(num_sequences: int, num_bins: int, num_ranks: int) -> None:
    if num_sequences < max(num_bins, num_ranks):
        problem = Problem(
            "training.global_batch_size",
            str(num_sequences),
            f"at least {max(num_bins, num_ranks)}: {num_ranks} data-parallel ranks run as many micro-batches each",
            "raise the batch, or use more tensor or pipeline parallelism",
        )
        raise ConfigError([problem])


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def _split_heaviest(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Cut the heaviest bin with more than one sequence into two of about equal weight."""
    heaviest = max((b for b in bins if len(b) > 1), key=lambda b: (sum(lengths[i] for i in b), -b[0]))
    halves: tuple[list[int], list[int]] = ([], [])
    for index in heaviest:  # the longest first, as it was filled
        lighter = min(halves, key=lambda half: sum(lengths[i] for i in half))
        lighter.append(index)
    bins[bins.index(heaviest) : bins.index(heaviest) + 1] = list(halves)


def _balance(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins, the heaviest first to the rank with the least tokens so far."""
    per_rank = len(bins) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap: all loads are equal, and the ranks ascend
    for members in sorted(bins, key=lambda b: (-sum(lengths[i] for i in b), min(b))):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(sorted(members))
        if len(ranks[rank]) < per_rank:
            heapq.heappush(loads, (load + sum(lengths[i] for i in members), rank))
    return ranks

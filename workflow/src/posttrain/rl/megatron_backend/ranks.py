"""This rank's place among the parallel groups, and its random state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from posttrain.rl.megatron_backend.plain_data import gather_tensors


def seed_random_state(seed: int) -> None:
    """Set all random state of this process, Megatron's for each parallel group included."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def data_parallel_rank() -> int:
    """Return which share of the samples is this rank's."""
    return parallel_state.get_data_parallel_rank()


def gather_over_data_parallel(mine: torch.Tensor) -> list[torch.Tensor]:
    """Return what each data-parallel rank has given, see `gather_tensors`; collective."""
    return gather_tensors(mine, parallel_state.get_data_parallel_group())


def largest_of_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the largest of all ranks' `values`, NaN where any rank has one; collective.

    gloo's maximum keeps a NaN of the group's first rank and loses those of the others.
    """
    is_nan = values.isnan()
    # -1 where this rank has a number, so the maximum is 0 where any rank has none. A rehearsal takes unknown numbers
    # for 1 and finds no NaN.
    both = torch.stack([values.masked_fill(is_nan, -torch.inf), -(~is_nan).to(values.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] == 0, torch.nan)


def sum_over_data_parallel(values: torch.Tensor) -> None:
    """Add up `values` of all data-parallel ranks, in place; collective."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())

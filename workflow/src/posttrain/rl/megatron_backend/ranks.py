"""This rank's place among the parallel groups, and its random state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from posttrain.rl.megatron_backend.plain_data import gather_tensors


def seed_random_state(seed: int) -> None:
    """Seed all random state of this process, including Megatron's per parallel group."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def data_parallel_rank() -> int:
    """Return this rank's data-parallel rank."""
    return parallel_state.get_data_parallel_rank()


def gather_over_data_parallel(mine: torch.Tensor) -> list[torch.Tensor]:
    """Gather a tensor over data-parallel ranks, see `gather_tensors`; collective."""
    return gather_tensors(mine, parallel_state.get_data_parallel_group())


def largest_of_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the elementwise maximum of all ranks' `values`, NaN if any rank has NaN; collective.

    gloo's maximum keeps only the NaNs of the group's first rank.
    """
    is_nan = values.isnan()
    # -1 for a number and 0 for NaN, so the maximum is 0 if any rank has NaN. A rehearsal treats unknown numbers as 1
    # and finds no NaN.
    both = torch.stack([values.masked_fill(is_nan, -torch.inf), -(~is_nan).to(values.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] == 0, torch.nan)


def sum_over_data_parallel(values: torch.Tensor) -> None:
    """Sum `values` over all data-parallel ranks, in place; collective."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())

"""The DSA indexer as two operators of torch that start Triton kernels; each process compares them with torch first.

A score differs from `sparse_attention.index_scores` of the same BF16 inputs by at most `score_bound`, because sums are
taken in another order. So the chosen keys are the same, but for keys whose score is within twice the bound of the K-th
highest. There is no gradient.

Shapes: C queries, S keys, H_i indexer heads of width D, K kept keys.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.flop_counter import register_flop_formula

from posttrain.rl.megatron_backend.glm5 import index_kernel
from posttrain.rl.megatron_backend.glm5.sparse_attention import select_topk


class WrongKernelError(RuntimeError):
    """A kernel chooses other keys than torch."""


def choose_in_kernels(
    queries: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    topk: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the places [B, C, K] of a chunk's keys; see `choice.ChooseChunk`. The kernels see one row of sequences."""
    num_sequences, num_keys, width = keys.shape
    first = num_keys * torch.arange(num_sequences, device=keys.device)[:, None].expand_as(positions)
    span = first.flatten().int(), (first + positions + 1).flatten().int()
    row = queries.flatten(0, 1), keys.flatten(0, 1), weights.flatten(0, 1) * width**-0.5
    places = choose_places(*row, *span, topk).unflatten(0, positions.shape)
    return torch.where(places < 0, places, places - first[..., None]).to(dtype)


def choose_places(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int
) -> torch.Tensor:
    """Return the positions of the best keys of each query.

    Args:
        queries: [C, H_i, D] bf16.
        keys: [S, D] bf16.
        weights: [C, H_i] fp32, scaled by (H_i * D) ** -0.5.
        first: [C] int32, the first key that each query sees.
        end: [C] int32, the last key that it sees, plus 1.
        topk: K.

    Returns:
        [C, K] int32, ascending; padded with -1. Of equal scores the lower position wins.

    Raises:
        WrongKernelError: On this device the kernels choose other keys than torch, found before their first use.
    """
    planes = torch.ops.posttrain.indexer_scores(queries, keys, weights, first, end, topk)
    return torch.ops.posttrain.indexer_choice(planes, first, end, topk)


def score_bound(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return how far the kernel's scores may be from exact ones, [C, S].

    A sum of n products in FP32, in any order, differs from the exact one by at most n units of rounding (2^-24) times
    the sum of the magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Tensor cores cut
    off instead of rounding, which doubles the unit.
    """
    magnitudes = torch.einsum("chd,sd->chs", queries.double().abs(), keys.double().abs())
    heads, width = queries.shape[1:]
    return 2**-23 * (heads + width) * torch.einsum("ch,chs->cs", weights.double().abs(), magnitudes)


@torch.library.custom_op("posttrain::indexer_scores", mutates_args=())
def _scores(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int
) -> torch.Tensor:
    assert queries.dtype == keys.dtype == torch.bfloat16, f"queries of {queries.dtype}, keys of {keys.dtype}"
    assert weights.dtype == torch.float32, f"head weights of {weights.dtype}"
    _require_agreement(queries.device, queries.shape[1], queries.shape[2], topk)
    span = first.contiguous(), end.contiguous()
    return index_kernel.launch_scores(queries.contiguous(), keys.contiguous(), weights.contiguous(), *span, topk)


@_scores.register_fake
def _(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int
) -> torch.Tensor:
    return queries.new_empty(index_kernel.planes_shape(len(queries), len(keys)), dtype=torch.uint16)


@torch.library.custom_op("posttrain::indexer_choice", mutates_args=())
def _choice(planes: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
    return index_kernel.launch_choice(planes, first.contiguous(), end.contiguous(), topk)


@_choice.register_fake
def _(planes: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
    return first.new_empty(len(first), topk)


@register_flop_formula(torch.ops.posttrain.indexer_scores)
def _score_flops(queries: torch.Size, keys: torch.Size, *_: object, **__: object) -> int:
    """Products of queries and keys, and the weighted sum over heads: each pair is scored once."""
    num_queries, heads, width = queries
    return 2 * num_queries * keys[0] * heads * (width + 1)


@cache
def _require_agreement(device: torch.device, heads: int, width: int, topk: int) -> None:
    """Compare the kernels with torch on whole numbers, whose sums are exact, with many equal scores."""
    numbers = torch.Generator().manual_seed(1)
    num_queries, num_keys = index_kernel.TILE_QUERIES + 5, topk + 2 * index_kernel.TILE_KEYS + 9
    queries, some_keys, weights = (
        torch.randint(-8, 9, shape, generator=numbers).float()
        for shape in ((num_queries, heads, width), (97, width), (num_queries, heads))
    )
    keys = some_keys[torch.arange(num_keys) % len(some_keys)]
    end = num_keys - torch.arange(num_queries).flip(0)
    # Every third query belongs to a sequence that begins later; it sees 3 keys more than are kept, as
    # many, or 3 fewer.
    first = torch.where(torch.arange(num_queries) % 3 == 0, end - topk - 3 + torch.arange(num_queries) % 9, 0)
    expected = _places_in_torch(queries, keys, weights / 8, first, end, topk)
    span = first.int().to(device), end.int().to(device)
    given = queries.bfloat16().to(device), keys.bfloat16().to(device), (weights / 8).to(device)
    found = index_kernel.launch_choice(index_kernel.launch_scores(*given, *span, topk), *span, topk).cpu()
    if not torch.equal(found, expected):
        import triton  # not the installed package's version: its name differs by hardware

        raise WrongKernelError(
            f"{device}: the indexer's kernel chooses other keys than torch (Triton {triton.__version__}); install the "
            "Triton that this torch requires"
        )


def _places_in_torch(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int
) -> torch.Tensor:
    dots = torch.einsum("chd,sd->chs", queries, keys)
    position, last = torch.arange(len(keys)), len(keys)
    visible = (position >= first[:, None]) & (position < end[:, None])
    keep = select_topk(torch.einsum("ch,chs->cs", weights, dots.relu()), visible, topk)
    ordered = torch.where(keep, position, last).sort(-1).values[:, :topk]
    return ordered.masked_fill(ordered == last, -1).int()

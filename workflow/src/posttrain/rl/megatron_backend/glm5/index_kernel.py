"""The DSA indexer as two Triton kernels: scores of a chunk of queries, then each query's best keys.

`score_keys` multiplies a tile of queries with a tile of keys, head by head, on tensor cores (BF16 factors, FP32 sums),
and writes one score per pair. Scores are stored as unsigned integers in the order of the numbers, in two planes: the
upper and the lower 16 bits. `keep_best` finds each query's K-th highest score digit by digit (radix select, 8 bits at a
time), and writes the positions of the keys above it in ascending order; of equal scores the lower position wins. Its
first two passes and most of the others read the upper plane alone.

Source: scores as in `sparse_attention`; radix select, Alabi et al., Fast k-selection algorithms for graphics processing
units (2012), section 3.2.

Shapes: C queries, S keys, H_i indexer heads of width D, K kept keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Queries and keys of a tile. The keys stay on the multiprocessor while the queries of all heads pass through it.
TILE_QUERIES, TILE_KEYS = 64, 256
SCORE_OPTIONS = {"num_warps": 8, "num_stages": 3}
# Scores that a program of `keep_best` reads at a time, and values of a digit.
SPAN = 2048
CHOICE_OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit
def score_keys(  # type: ignore[no-untyped-def]
    queries,  # [C, HEADS, WIDTH] bf16
    keys,  # [S, WIDTH] bf16
    weights,  # [C, HEADS] fp32
    first,  # [C] int32: first key that each query sees
    end,  # [C] int32: last key that it sees, plus 1
    uppers,  # [C, stride] uint16
    lowers,  # [C, stride] uint16
    num_queries,
    num_keys,
    stride,
    topk,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # WIDTH as a power of two
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the scores of a tile, unless no query of it has more than `topk` keys to choose from."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    begin = tl.program_id(1) * KEYS
    place, channel = begin + tl.arange(0, KEYS), tl.arange(0, PADDED)
    is_query, is_channel = query < num_queries, channel < WIDTH
    own_first = tl.load(first + query, mask=is_query, other=0)
    own_end = tl.load(end + query, mask=is_query, other=0)
    has_choice = own_end - own_first > topk
    lowest = tl.min(tl.where(has_choice, own_first, num_keys), 0)
    highest = tl.max(tl.where(has_choice, own_end, 0), 0)
    if (begin < highest) & (begin + KEYS > lowest):
        is_key = (place < num_keys)[None, :] & is_channel[:, None]
        key = tl.load(keys + place[None, :] * WIDTH + channel[:, None], mask=is_key, other=0.0)
        rows = queries + query.to(tl.int64)[:, None] * (HEADS * WIDTH) + channel[None, :]
        scores = tl.zeros((QUERIES, KEYS), tl.float32)
        for head in range(HEADS):
            head_query = tl.load(rows + head * WIDTH, mask=is_query[:, None] & is_channel[None, :], other=0.0)
            weight = tl.load(weights + query * HEADS + head, mask=is_query, other=0.0)
            scores += weight[:, None] * tl.maximum(tl.dot(head_query, key), 0.0)
        # Flip the sign bit of positive numbers and all bits of negative ones: integers in the order of the numbers.
        bits = scores.to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
        target = query.to(tl.int64)[:, None] * stride + place[None, :]
        tl.store(uppers + target, (ordered >> 16).to(tl.uint16), mask=is_query[:, None])
        tl.store(lowers + target, (ordered & 0xFFFF).to(tl.uint16), mask=is_query[:, None])


@triton.jit
def _highest(values, gates, gate, begin, end, left, IS_GATED: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the `left`-th highest 16-bit value from `begin` to `end`, and how many equal to it are among those `left`.

    Gated: only of places where `gates` equals `gate`.
    """
    found, bins = 0, tl.arange(0, 256)
    for half in tl.static_range(2):
        shift = 8 - 8 * half
        counts = tl.zeros((256,), tl.int32)
        for start in range(begin // SPAN * SPAN, end, SPAN):
            place = start + tl.arange(0, SPAN)
            is_here = (place >= begin) & (place < end)
            if IS_GATED:
                is_here = is_here & (tl.load(gates + place, mask=is_here, other=0).to(tl.int32) == gate)
            value = tl.load(values + place, mask=is_here, other=0).to(tl.int32)
            is_candidate = is_here & ((value >> (shift + 8)) == found)
            counts += tl.histogram((value >> shift) & 255, 256, mask=is_candidate)
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((at_least >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        found = found * 256 + digit
    return found, left


@triton.jit
def keep_best(  # type: ignore[no-untyped-def]
    uppers,  # [C, stride] uint16
    lowers,  # [C, stride] uint16
    first,  # [C] int32
    end,  # [C] int32
    places,  # [C, topk] int32
    stride,
    topk,
    SPAN: tl.constexpr,
):
    """Write the positions of a query's best keys."""
    query = tl.program_id(0).to(tl.int64)
    own_first, own_end = tl.load(first + query), tl.load(end + query)
    kept, count = places + query * topk, own_end - own_first
    if count <= topk:
        for start in range(0, topk, SPAN):
            slot = start + tl.arange(0, SPAN)
            tl.store(kept + slot, tl.where(slot < count, own_first + slot, -1), mask=slot < topk)
    else:
        uppers += query * stride
        lowers += query * stride
        upper, left = _highest(uppers, uppers, 0, own_first, own_end, topk, False, SPAN)
        lower, left = _highest(lowers, uppers, upper, own_first, own_end, left, True, SPAN)
        num_above, num_tied = 0, 0
        for start in range(own_first // SPAN * SPAN, own_end, SPAN):
            place = start + tl.arange(0, SPAN)
            is_here = (place >= own_first) & (place < own_end)
            value = tl.load(uppers + place, mask=is_here, other=0).to(tl.int32)
            is_close = is_here & (value == upper)
            rest = tl.load(lowers + place, mask=is_close, other=0).to(tl.int32)
            is_above = is_here & ((value > upper) | (is_close & (rest > lower)))
            is_tied = is_close & (rest == lower)
            above_so_far = num_above + tl.cumsum(is_above.to(tl.int32), 0)
            tied_so_far = num_tied + tl.cumsum(is_tied.to(tl.int32), 0)
            slot = above_so_far + tl.minimum(tied_so_far, left) - 1
            tl.store(kept + slot, place, mask=is_above | (is_tied & (tied_so_far <= left)))
            num_above += tl.sum(is_above.to(tl.int32), 0)
            num_tied += tl.sum(is_tied.to(tl.int32), 0)


def launch_scores(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int
) -> torch.Tensor:
    """Return the planes of the scores, [2, C, S rounded up to tiles] uint16; see `score_keys`."""
    (num_queries, heads, width), num_keys = queries.shape, len(keys)
    planes = queries.new_empty(planes_shape(num_queries, num_keys), dtype=torch.uint16)
    grid = triton.cdiv(num_queries, TILE_QUERIES), triton.cdiv(num_keys, TILE_KEYS)
    with torch.cuda.device_of(planes):
        score_keys[grid](
            *(queries, keys, weights, first, end, planes[0], planes[1], num_queries, num_keys, planes.shape[-1], topk),
            HEADS=heads,
            WIDTH=width,
            PADDED=max(16, triton.next_power_of_2(width)),
            QUERIES=TILE_QUERIES,
            KEYS=TILE_KEYS,
            **SCORE_OPTIONS,
        )
    return planes


def launch_choice(planes: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the places of the best keys, [C, K] int32; see `keep_best`."""
    num_queries, stride = planes.shape[1:]
    places = first.new_empty(num_queries, topk, dtype=torch.int32)
    with torch.cuda.device_of(planes):
        keep_best[(num_queries,)](planes[0], planes[1], first, end, places, stride, topk, SPAN=SPAN, **CHOICE_OPTIONS)
    return places


def planes_shape(num_queries: int, num_keys: int) -> tuple[int, int, int]:
    """Return the shape of the scores' two planes: whole tiles of keys, so that rows stay aligned."""
    return 2, num_queries, -(-num_keys // TILE_KEYS) * TILE_KEYS

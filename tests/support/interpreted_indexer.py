"""The indexer's kernels in Triton's interpreter: prints a line of JSON, for each case what was wrong or was counted."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.support import interpreted_triton

from posttrain.rl.megatron_backend.glm5 import fused_indexer, index_kernel
from posttrain.rl.megatron_backend.glm5.choice import choose_in_chunks
from posttrain.rl.megatron_backend.glm5.fused_indexer import choose_in_kernels
from posttrain.rl.megatron_backend.packed import PackedSequences

# GLM-5's indexer.
HEADS, WIDTH, TOPK = 32, 128, 2048


class Given(NamedTuple):
    """Arguments of `fused_indexer.choose_places` but the number of keys to keep."""

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor

    def of(self, chosen: slice) -> Given:
        """Return some of the queries."""
        return Given(self.queries[chosen], self.keys, *(part[chosen].contiguous() for part in self[2:]))


def random(first: torch.Tensor, end: torch.Tensor, num_keys: int, heads: int = 3, width: int = 24) -> Given:
    numbers = torch.Generator().manual_seed(1)
    shapes = (len(first), heads, width), (num_keys, width), (len(first), heads)
    queries, keys, weights = (torch.randn(shape, generator=numbers) for shape in shapes)
    return Given(queries.bfloat16(), keys.bfloat16(), weights * (heads * width) ** -0.5, first.int(), end.int())


def causal(num_queries: int, num_keys: int, **shape: int) -> Given:
    """Return the last queries of one sequence."""
    end = torch.arange(num_keys - num_queries, num_keys) + 1
    return random(torch.zeros(num_queries), end, num_keys, **shape)


def packed(lengths: list[int], rank: int = 0, num_ranks: int = 1) -> Given:
    """Return a context-parallel rank's queries of a row of sequences, and the row's keys."""
    row = PackedSequences.from_boundaries(torch.tensor([0, *lengths]).cumsum(0).int(), rank, num_ranks)
    own = torch.arange(sum(lengths)) if row.own is None else row.own
    return random(own - row.position_ids, own + 1, sum(lengths))


def decoded(planes: torch.Tensor) -> torch.Tensor:
    """Return the scores that the two planes hold."""
    upper, lower = planes.long()
    ordered = (upper << 16) | lower
    bits = torch.where(ordered >= 1 << 31, ordered ^ (1 << 31), ~ordered & 0xFFFFFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def require_choice(given: Given, topk: int, rows: slice = slice(None)) -> None:
    """Hold scores and places against exact scores: other places only where scores are within twice the bound."""
    planes = index_kernel.launch_scores(*given, topk)
    assert planes.shape == index_kernel.planes_shape(len(given.queries), len(given.keys))
    chosen, position = given.of(rows), torch.arange(len(given.keys))
    found = index_kernel.launch_choice(planes[:, rows].contiguous(), chosen.first, chosen.end, topk)
    exact = torch.einsum("chd,sd->chs", chosen.queries.double(), chosen.keys.double()).relu()
    exact = torch.einsum("ch,chs->cs", chosen.weights.double(), exact)
    bound = fused_indexer.score_bound(chosen.queries, chosen.keys, chosen.weights)
    visible = (position >= chosen.first[:, None]) & (position < chosen.end[:, None])
    scored = visible & (visible.sum(1, keepdim=True) > topk)
    errors = (decoded(planes[:, rows])[:, : len(position)] - exact).abs()
    assert (errors[scored] <= bound[scored]).all(), f"{(errors / bound)[scored].max()} bounds"
    for query, places in enumerate(found):
        count = min(topk, int(visible[query].sum()))
        assert (places[:count].diff() > 0).all(), f"query {query} is not in order: {places.tolist()}"
        assert (places[count:] == -1).all(), f"query {query} is not padded: {places.tolist()}"
        keep = torch.zeros_like(visible[query])
        keep[places[:count].long()] = True
        assert not (keep & ~visible[query]).any(), f"query {query} sees what it may not"
        lowest = exact[query].masked_fill(~visible[query], -torch.inf).topk(count).values[-1:]
        doubt = 2 * bound[query]
        assert not (visible[query] & ~keep & (exact[query] > lowest + doubt)).any(), f"query {query} misses a key"
        assert not (keep & (exact[query] < lowest - doubt)).any(), f"query {query} keeps a wrong key"


def require_lowest(given: Given, topk: int) -> None:
    """Hold the choice between equal scores against the lowest positions."""
    found = index_kernel.launch_choice(index_kernel.launch_scores(*given, topk), given.first, given.end, topk)
    expected = given.first[:, None] + torch.arange(topk)
    assert torch.equal(found, expected.where(expected < given.end[:, None], -1).int()), found.tolist()


def equal_scores() -> None:
    one = causal(9, 300)
    # Small integers: sums are exact in any order, which BLAS chooses by a column's place.
    whole = one._replace(queries=one.queries.round(), keys=one.keys.round(), weights=one.weights.round())
    require_lowest(whole._replace(keys=whole.keys[:1].expand(300, -1).contiguous()), 40)
    require_lowest(one._replace(first=torch.full((9,), 100).int(), weights=one.weights * 0), 40)
    require_lowest(one._replace(queries=one.queries.abs(), keys=-one.keys.abs()), 40)


def zeros_and_infinities() -> None:
    """The order of the numbers holds to their ends."""
    keys = torch.tensor([[0.0], [1.0], [-1.0], [3e38], [2.0], [0.0]]).bfloat16()
    weights, first, end = torch.tensor([[-1.0], [-10.0], [10.0]]), torch.zeros(3).int(), torch.full((3,), 6).int()
    given = Given(torch.ones(3, 1, 1).bfloat16(), keys, weights, first, end)
    found = index_kernel.launch_choice(index_kernel.launch_scores(*given, 4), first, end, 4)
    assert found.tolist() == [[0, 1, 2, 5], [0, 1, 2, 5], [0, 1, 3, 4]], found.tolist()


def blocks_of_sequences() -> None:
    """Two sequences of a block, every second query, chosen in chunks; on whole numbers as torch does, bit for bit."""
    numbers = torch.Generator().manual_seed(2)
    shapes = (2, 21, 3, 16), (2, 42, 16), (2, 21, 3)
    queries, keys, weights = (torch.randint(-3, 4, shape, generator=numbers) for shape in shapes)
    positions = torch.arange(1, 42, 2).expand(2, -1)
    given = queries.bfloat16(), weights.float(), positions, keys.bfloat16(), 0, 2, 12, 10, torch.int16
    found = choose_in_chunks(*given, choose_in_kernels)
    expected = choose_in_chunks(*given)
    assert found.dtype == torch.int16
    assert torch.equal(found, expected), (found != expected).nonzero().tolist()


def bytes_per_pair(length: int) -> dict[str, float]:
    """Return the bytes that a causal row of GLM-5's indexer moves per pair; of four tiles of queries, evenly spaced."""
    moved, pairs = interpreted_triton.count_bytes(), 0
    for tile in range(4):
        middle, half = length * (2 * tile + 1) // 8, index_kernel.TILE_QUERIES // 2
        whole = causal(middle + half, middle + half, heads=1, width=1)
        some = slice(middle - half, middle + half)
        numbers = torch.Generator().manual_seed(tile)
        shapes = (2 * half, HEADS, WIDTH), (length, WIDTH), (2 * half, HEADS)
        queries, keys, weights = (torch.randn(shape, generator=numbers) for shape in shapes)
        given = Given(queries.bfloat16(), keys.bfloat16(), weights / 64, whole.first[some], whole.end[some])
        # Every eighth query, for all of them do the same.
        before = moved.copy()
        planes = index_kernel.launch_scores(*given, TOPK)
        scores = moved - before
        eighth = given.of(slice(0, None, 8))
        index_kernel.launch_choice(planes[:, ::8].contiguous(), eighth.first, eighth.end, TOPK)
        for kind, size in (moved - before - scores).items():
            moved[kind] += 7 * size
        pairs += int(given.end.sum())
    return {kind: size / pairs for kind, size in moved.items()}


CASES: dict[str, Callable[[], Any]] = {
    "one token": lambda: require_choice(causal(1, 1), 4),
    "one token and one key to keep": lambda: require_choice(causal(1, 9, heads=1, width=16), 1),
    "lengths that do not divide": lambda: require_choice(causal(70, 301), 32, slice(0, None, 6)),
    "several sequences in a row": lambda: require_choice(packed([5, 130, 1, 64, 71]), 16, slice(0, None, 15)),
    "the halves of a context-parallel rank": lambda: require_choice(packed([160, 96], 1, 2), 16, slice(0, None, 9)),
    "more to keep than is seen": lambda: require_choice(causal(5, 300), 512),
    "as many to keep as are seen": lambda: require_choice(causal(4, 98), 96),
    "far keys of a long row": lambda: require_choice(
        random(torch.tensor([0, 3000, 4095]), torch.tensor([5000, 4999, 4500]), 5000), 100
    ),
    "GLM-5's widths": lambda: require_choice(causal(3, 520, heads=HEADS, width=WIDTH), 256),
    "equal scores": equal_scores,
    "a block of two sequences": blocks_of_sequences,
    "zeros and infinities": zeros_and_infinities,
    "agreement before the first use": lambda: fused_indexer._require_agreement(torch.device("cpu"), 2, 16, 20),
    "bytes of 4,096 tokens": lambda: bytes_per_pair(4096),
    "bytes of 8,192 tokens": lambda: bytes_per_pair(8192),
}


def main() -> None:
    """Run all cases."""
    interpreted_triton.prepare()
    told: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            told[name] = case()
        except Exception:
            told[name] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    main()

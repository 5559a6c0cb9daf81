"""Digests of weights that add up over shards, and that no change leaves as they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from posttrain.engines.in_sglang.posttrain_plugin import digests
from posttrain.engines.in_sglang.posttrain_plugin.digests import NUM_COLUMNS, Digester, as_text, key_of

KEY = key_of("secret", "7")
TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def digester(key: bytes = KEY, num_rows: int = 64, row_bytes: int = 400) -> Digester:
    return Digester(key, num_rows, row_bytes)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_shards_of_any_cut_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = random((40, 37), dtype)
    expected = digester().part(whole)
    cuts = itertools.product(itertools.pairwise((0, 3, 20, 40)), itertools.pairwise((0, 1, 18, 37)))
    parts = [digester().part(whole[slice(*r), slice(*c)], (r[0], c[0])) for r, c in cuts]
    assert torch.equal(sum(parts[1:], parts[0]), expected)
    assert torch.equal(digester().part(whole[5], (5, 0)[1:]), digester().part(whole[5:6], (0, 0))), "one row"
    # Sizes of the largest tensor that a digester is made for change nothing of the others.
    assert torch.equal(digester(num_rows=1000, row_bytes=5000).part(whole), expected)


def test_a_digest_is_what_its_formula_says() -> None:
    """In Python's integers, with the factors that the key gives."""
    values, made = random((5, 3), torch.bfloat16), digester()
    octets = values.view(torch.int8).numpy().astype(object)
    columns, mixed, rows = (t.numpy().astype(object) for t in (made._columns, made._mixed, made._rows))
    lanes = [
        sum(
            octets[r, b] * columns[b, c] * mixed[c, lane] * rows[r, lane]
            for r in range(5)
            for b in range(6)
            for c in range(NUM_COLUMNS)
        )
        for lane in range(2)
    ]
    assert as_text(made.part(values)) == "".join(f"{lane % 2**64:016x}" for lane in lanes)
    assert np.abs(columns.astype(int)).max() == 64
    assert all(number % 2 for number in (*mixed.flat, *rows.flat))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_and_every_move_is_seen(dtype: torch.dtype) -> None:
    whole = random((20, 12), dtype)
    expected, seen = as_text(digester().part(whole)), set()
    for row, octet, bit in itertools.product(range(20), range(12 * dtype.itemsize), range(8)):
        flipped = whole.clone().view(torch.uint8)
        flipped[row, octet] ^= 1 << bit
        seen.add(as_text(digester().part(flipped.view(dtype))))
    assert len(seen) == 20 * 12 * dtype.itemsize * 8
    values = whole.float()  # exact, and has the operations
    moved = [values.roll(1, 0), values.roll(1, 1), values.flip(0), values.flip(1), values[torch.randperm(20)]]
    moved += [-values, values * 0, values.t().reshape(20, 12)]
    seen |= {as_text(digester().part(tensor.to(dtype))) for tensor in moved}
    assert expected not in seen
    assert len(seen) == 20 * 12 * dtype.itemsize * 8 + len(moved)


@pytest.mark.parametrize("at_once", [1, 400, digests.CPU_BATCH_BYTES])
def test_parts_that_are_digested_together_have_each_their_own(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of several shapes, types and places, some with gaps between their columns, in any order."""
    monkeypatch.setattr(digests, "CPU_BATCH_BYTES", at_once)
    shapes = [(5, 7), (1, 9), (5, 7), (3, 8), (5, 7), (5, 7), (3, 8), (1, 9)]
    wide = [random((rows, columns + 4), TYPES[n % 2], n) for n, (rows, columns) in enumerate(shapes)]
    parts = [whole[:, n % 4 : n % 4 + shapes[n][1]] for n, whole in enumerate(wide)]
    parts[7], corners = parts[7][0], [(n % 3, n // 4) for n in range(len(parts))]
    expected = [digester().part(part, corner) for part, corner in zip(parts, corners, strict=True)]
    assert torch.equal(digester().parts(parts, corners), torch.stack(expected))
    alike = [random((5, 7), torch.bfloat16, n) for n in range(30)]
    assert torch.equal(
        Digester.of_parts(KEY, alike, [(0, 0)] * 30), torch.stack([digester().part(part) for part in alike])
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(40, 37), (1, 5), (17, 8), (3, 64)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_has_the_same_digests(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    whole = random(shape, dtype)
    on_gpu = Digester(KEY, 64, 400, "cuda").part(whole.cuda(), (3, 2))
    assert torch.equal(on_gpu.cpu(), digester().part(whole, (3, 2)))
    together = Digester.of_parts(KEY, [whole.cuda(), whole.cuda().clone()], [(3, 2)] * 2)
    assert torch.equal(together, on_gpu.cpu().expand(2, 2))


def test_a_key_serves_one_version_of_one_job() -> None:
    whole = random((20, 12), torch.bfloat16)
    keys = [key_of("secret", "7"), key_of("secret", "8"), key_of("secret", "17"), key_of("another", "7")]
    assert len({as_text(digester(key).part(whole)) for key in keys}) == 4


def test_the_largest_sums_fit() -> None:
    """A row as long as may be, with the largest of all products."""
    octets = torch.full((1, digests.MOST_ROW_BYTES), -128, dtype=torch.int8)
    made = Digester(KEY, 1, digests.MOST_ROW_BYTES)
    made._columns = torch.full((digests.MOST_ROW_BYTES + 8, NUM_COLUMNS), -64, dtype=torch.int8)
    made._mixed, made._rows = (torch.ones(n, 2, dtype=torch.int64) for n in (NUM_COLUMNS, 1))
    assert made.part(octets).tolist() == [128 * 64 * digests.MOST_ROW_BYTES * NUM_COLUMNS] * 2

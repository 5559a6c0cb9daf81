"""Digests of weights that add up over shards, and that no change leaves as they are."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from posttrain_weights import digest, digest_triton
from posttrain_weights.digest import NUM_COLUMNS, Digester, as_text, key_of

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


def test_shards_of_a_convolution_add_up_to_the_whole() -> None:
    """[channels, 1, taps], or several rows per channel; only channels are cut."""
    for shape in ((12, 1, 4), (12, 3, 4)):
        whole = random(shape, torch.bfloat16)
        parts = [digester().part(whole[start:stop], (start, 0, 0)) for start, stop in ((0, 5), (5, 6), (6, 12))]
        assert torch.equal(torch.stack(parts).sum(0), digester().part(whole)), shape


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


@pytest.mark.parametrize("at_once", [1, 400, digest.CPU_BATCH_BYTES])
def test_parts_that_are_digested_together_have_each_their_own(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of several shapes, types and places, some with gaps between their columns, in any order."""
    monkeypatch.setattr(digest, "CPU_BATCH_BYTES", at_once)
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


def test_the_kernel_of_gpus_has_the_same_digests() -> None:
    """Interpreted by Triton, in a process of its own: how it runs is decided when it is imported."""
    command = [sys.executable, "-m", "tests.support.interpreted_digests"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_words_of_16_bytes_are_read_where_all_of_a_part_fits_them() -> None:
    """A GPU would not read others; Triton's interpreter does not mind."""
    fits = [160, 32, 300, 48, 7, 64]  # address, from row to row, rows, bytes of a row, and where it begins
    table = np.array([fits] + [[*fits[:n], fits[n] + 8, *fits[n + 1 :]] for n in range(6)])
    tiles = {is_aligned: digest_triton.tiles_of(table, is_aligned) for is_aligned in (True, False)}
    assert tiles[True].tolist() == [[part, row] for part in (0, 3, 5) for row in (0, 128, 256)]
    assert {*tiles[False][:, 0].tolist()} == {1, 2, 4, 6}


# GPU -> what multiplies 8-bit integers, and loads 16 bytes at once.
COMPILED = {
    GPUTarget("cuda", 80, 32): ("mma.sync.*s32.s8.s8.s32", "cp.async.cg.shared.global .*0x10"),
    GPUTarget("cuda", 90, 32): ("wgmma.mma_async.*s32.s8.s8", "cp.async.cg.shared.global .*0x10"),
    GPUTarget("cuda", 100, 32): ("(mma.sync.*s32.s8.s8.s32|tcgen05.mma.*kind::i8)", "cp.async.cg.shared.global .*0x10"),
    GPUTarget("hip", "gfx942", 64): ("v_mfma_i32", "global_load_dwordx4"),
}


@pytest.mark.parametrize("target", COMPILED, ids=lambda target: f"{target.backend}-{target.arch}")
@pytest.mark.parametrize("is_aligned", [True, False])
def test_the_kernel_is_compiled_for_gpus(target: GPUTarget, is_aligned: bool) -> None:
    """With products of 8-bit integers by tensor cores, and where the parts allow it with words of 16 bytes."""
    types = {"tiles": "*i32", "parts": "*i64", "columns": "*i8", "width": "i32"}
    types |= dict.fromkeys(("mixed", "rows", "found"), "*i64")
    options = dict(digest_triton.OPTIONS)
    constants = {name: options.pop(name) for name in ("ROWS", "OCTETS", "COLUMNS")} | {"IS_ALIGNED": is_aligned}
    fits_words = {(number,): [["tt.divisibility", 16]] for number in range(len(types))}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(digest_triton.digest_rows, types, constants, fits_words)
    compiled = triton.compile(source, target=target, options=options)
    product, wide_load = COMPILED[target]
    code = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert re.search(product, code)
    assert bool(re.search(wide_load, code)) == is_aligned
    # Three programs on a multiprocessor of NVIDIA's, one on a compute unit of AMD's.
    assert compiled.metadata.shared <= ((228 << 10) // 3 if target.backend == "cuda" else 64 << 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(40, 37), (1, 5), (17, 8), (3, 64), (300, 640)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_has_the_same_digests(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    whole = random(shape, dtype)
    corners = [(3, 2), (0, 16), (1, 0), (2, 1)]
    parts = [whole, whole, whole[:, 1:], whole.t()]
    expected = Digester.of_parts(KEY, parts, corners)
    assert torch.equal(Digester.of_parts(KEY, [part.cuda() for part in parts], corners), expected)
    there = whole.cuda()
    views = [there, there, there[:, 1:], there.t()]
    assert torch.equal(Digester.of_parts(KEY, views, corners), expected)


def test_a_gpu_whose_kernel_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what both know, before anything is digested: engine and trainer would agree on the same wrong digests."""
    right = Digester.parts
    monkeypatch.setattr(Digester, "_fused", lambda self, *given: right(Digester(self._key, 300, 400), *given) + 1)
    with pytest.raises(digest.WrongKernelError, match=r"not those of the CPU \(Triton 3.*install the Triton"):
        digest._require_agreement(torch.device("cpu"))


def test_a_gpu_is_asked_before_it_digests_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise digest.WrongKernelError(str(device))

    monkeypatch.setattr(digest, "_require_agreement", refuse)
    with pytest.raises(digest.WrongKernelError, match="cuda:3"):
        Digester(KEY, 64, 400, "cuda:3").parts([random((3, 4), torch.float32)], [(0, 0)])


def test_a_key_serves_one_version_of_one_job() -> None:
    whole = random((20, 12), torch.bfloat16)
    keys = [key_of("secret", "7"), key_of("secret", "8"), key_of("secret", "17"), key_of("another", "7")]
    assert len({as_text(digester(key).part(whole)) for key in keys}) == 4


def test_the_largest_sums_fit() -> None:
    """A row as long as may be, with the largest of all products."""
    octets = torch.full((1, digest.MOST_ROW_BYTES), -128, dtype=torch.int8)
    made = Digester(KEY, 1, digest.MOST_ROW_BYTES)
    made._columns = torch.full((digest.MOST_ROW_BYTES + 8, NUM_COLUMNS), -64, dtype=torch.int8)
    made._mixed, made._rows = (torch.ones(n, 2, dtype=torch.int64) for n in (NUM_COLUMNS, 1))
    assert made.part(octets).tolist() == [128 * 64 * digest.MOST_ROW_BYTES * NUM_COLUMNS] * 2

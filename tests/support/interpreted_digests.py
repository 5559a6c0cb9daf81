"""Digests by the kernel of GPUs, which Triton interprets here: TRITON_INTERPRET has to be set before it is imported."""

from __future__ import annotations

import itertools

import torch

from posttrain_weights import digest, digest_triton
from posttrain_weights.digest import Digester, key_of

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
SHAPES = ((1, 5), (17, 8), (40, 37), (3, 640), (128, 128), (129, 32), (300, 200))
CORNERS = ((0, 0), (3, 2), (9, 16))


def main() -> None:
    """Compare with torch, of many shapes, types and places, with gaps or none; raises where one differs."""
    numbers = torch.Generator().manual_seed(1)
    kinds = [*itertools.product(SHAPES, TYPES, CORNERS, (0, 16), (False, True))]
    parts, corners = [], []
    for (rows, columns), dtype, corner, gap, is_turned in kinds:
        shape = (columns, rows + gap) if is_turned else (rows, columns + gap)
        whole = torch.randn(shape, generator=numbers).to(dtype)
        parts.append(whole[:, gap:].t() if is_turned else whole[:, gap:])
        corners.append(corner)
    parts.append(torch.randn(77, generator=numbers))
    corners.append((2, 3))
    key = key_of("secret", "7")
    expected = Digester(key, 400, 4000).parts(parts, corners)
    for digest.COPIED_BYTES in (1 << 26, 1 << 10):
        found = Digester(key, 400, 4000)._fused(parts, corners)
        assert torch.equal(found, expected), (found != expected).any(1).nonzero().flatten().tolist()
    num_batches = sum(1 for _ in digest._batches(parts))
    assert len(parts) / 4 < num_batches < len(parts), "what can be read where it lies waits for no copy"
    table = digest_triton.described([digest.octets_of(part) for part in parts], corners)
    num_programs = [len(digest_triton.tiles_of(table, is_aligned)) for is_aligned in (True, False)]
    assert min(num_programs) > 20, num_programs
    most = torch.full((1, digest.MOST_ROW_BYTES), -128, dtype=torch.int8)
    wide = Digester(key, 1, digest.MOST_ROW_BYTES)
    wide._columns = torch.full((digest.MOST_ROW_BYTES, digest.NUM_COLUMNS), -64, dtype=torch.int8)
    assert torch.equal(wide._fused([most], [(0, 0)]), wide.parts([most], [(0, 0)]))
    digest._require_agreement(torch.device("cpu"))
    print(f"{len(parts)} parts, {num_programs} programs")


if __name__ == "__main__":
    main()

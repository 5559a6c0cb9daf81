"""The indexer's kernels: their choice, the bytes that they move, and what they take of GPUs that are not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.support import compiled_indexer
from tests.support.workflow_runs import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from posttrain.rl.megatron_backend.glm5 import fused_indexer, index_kernel
from posttrain.rl.megatron_backend.glm5.sparse_attention import index_scores, select_topk

CASES = (
    *("one token", "one token and one key to keep", "lengths that do not divide", "several sequences in a row"),
    *("the halves of a context-parallel rank", "more to keep than is seen", "as many to keep as are seen"),
    *("far keys of a long row", "GLM-5's widths", "equal scores", "a block of two sequences", "zeros and infinities"),
    "agreement before the first use",
)
LENGTHS = ("4,096", "8,192")
# GPU -> what multiplies BF16 numbers on its tensor cores.
PRODUCTS = {"9.0": r"wgmma.mma_async.*f32.bf16.bf16", "10.0": r"tcgen05.mma.*kind::f16", "gfx942": r"v_mfma_f32.*bf16"}
# Bytes of shared memory that a program may have.
MOST_SHARED = {"9.0": 227 << 10, "10.0": 227 << 10, "gfx942": 64 << 10}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Run all cases in a process of its own: how kernels run is decided when they are imported."""
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.interpreted_indexer"]
    environment = os.environ | {"TRITON_INTERPRET": "1"} | one_thread
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_choose_what_torch_chooses(interpreted: dict[str, Any], case: str) -> None:
    """In order and padded, ties to the lower position, other keys only where scores are within twice the bound."""
    assert interpreted[case] is None, interpreted[case]


def test_every_case_is_judged(interpreted: dict[str, Any]) -> None:
    assert {*interpreted} == {*CASES, *(f"bytes of {length} tokens" for length in LENGTHS)}


@pytest.mark.parametrize("length", LENGTHS)
def test_few_bytes_are_moved_per_pair(interpreted: dict[str, Any], length: str) -> None:
    """Of a query and a key before it, with GLM-5's indexer; torch moves 1,163."""
    moved = interpreted[f"bytes of {length} tokens"]
    assert 40 < sum(moved.values()) < 55, moved
    assert moved["store"] > 4 * 0.7, "a score is stored, unless all keys are kept"


@pytest.mark.parametrize("target", compiled_indexer.TARGETS)
@pytest.mark.parametrize("name", compiled_indexer.KERNELS)
def test_the_kernels_are_compiled_for_gpus(name: str, target: str) -> None:
    kernel = compiled_indexer.compiled(name, compiled_indexer.TARGETS[target])
    code = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    if name == "score_keys":
        assert re.search(PRODUCTS[target], code)
    taken = compiled_indexer.resources(kernel)
    assert 0 < taken.shared <= MOST_SHARED[target]
    assert 0 < taken.registers < 256
    assert taken.spilled == 0


def test_the_decision_has_the_table_of_resources() -> None:
    """Print it anew with `python -m tests.support.compiled_indexer`."""
    (record,) = (ROOT / "docs" / "decisions").glob("028-*.md")
    assert compiled_indexer.table() in record.read_text()


def test_the_operators_have_shapes_and_operations_without_a_device() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        queries, keys = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((70, 32, 128), (300, 128)))
        first, end = (torch.empty(70, dtype=torch.int32) for _ in range(2))
        places = fused_indexer.choose_places(queries, keys, torch.empty(70, 32), first, end, 40)
    assert (places.shape, places.dtype) == ((70, 40), torch.int32)
    dots, sums = 2 * 70 * 300 * 32 * 128, 2 * 70 * 300 * 32
    assert counter.get_total_flops() == dots + sums
    assert index_kernel.planes_shape(70, 300) == (2, 70, 512)


def test_a_device_whose_kernels_choose_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is chosen on it; here by kernels that let ties fall to the higher position."""
    right, asked = fused_indexer._places_in_torch, []

    def scores(*given: Any) -> torch.Tensor:
        asked.append(given)
        return torch.empty(0)

    def choice(planes: torch.Tensor, first: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
        queries, keys, weights, *_ = asked[-1]
        mirrored = [len(keys) - part for part in (end, first)]
        found = right(queries.float(), keys.float().flip(0), weights, *mirrored, topk)
        return (len(keys) - 1 - found).masked_fill(found < 0, len(keys)).sort(-1).values.int()

    monkeypatch.setattr(index_kernel, "launch_scores", scores)
    monkeypatch.setattr(index_kernel, "launch_choice", choice)
    given = [torch.ones(1, 2, 16).bfloat16(), torch.ones(1, 16).bfloat16(), torch.ones(1, 2)]
    span = [torch.zeros(1).int(), torch.ones(1).int()]
    with pytest.raises(fused_indexer.WrongKernelError, match=r"cpu: .* other keys than torch \(Triton 3"):
        fused_indexer.choose_places(*given, *span, 5)
    assert len(asked) == 1, "nothing but the comparison has run"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_chooses_the_same_keys_in_less_time() -> None:
    """Of the last queries of a row of 8,192 tokens, with GLM-5's indexer; prints the times."""
    numbers = torch.Generator().manual_seed(1)
    shapes = (1024, 32, 128), (8192, 128), (1024, 32)
    queries, keys, weights = (torch.randn(shape, generator=numbers).cuda() for shape in shapes)
    queries, keys, weights = queries.bfloat16(), keys.bfloat16(), weights / 64
    end = torch.arange(8192 - 1024, 8192, device="cuda").int() + 1
    given = queries, keys, weights, torch.zeros_like(end), end
    visible = torch.arange(8192, device="cuda") < end[:, None]

    def plain() -> torch.Tensor:
        return select_topk(index_scores(queries[None], keys[None], weights[None] * 128**0.5)[0], visible, 2048)

    keep = torch.zeros_like(visible).scatter_(1, fused_indexer.choose_places(*given, 2048).long(), True)
    exact = torch.einsum("chd,sd->chs", queries.double(), keys.double()).relu()
    exact = torch.einsum("ch,chs->cs", weights.double(), exact).masked_fill(~visible, -torch.inf)
    close = (exact - exact.topk(2048).values[:, -1:]).abs() <= 2 * fused_indexer.score_bound(*given[:3])
    assert not ((keep != plain()) & ~close).any()
    seconds = [
        Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=1).median
        for work in (lambda: fused_indexer.choose_places(*given, 2048), plain)
    ]
    print(f"fused {1e3 * seconds[0]:.2f} ms, torch {1e3 * seconds[1]:.2f} ms")
    assert seconds[0] < seconds[1] / 3

"""Stand-ins of compiled kernels refuse what the kernels refuse."""

import pytest
import torch

from posttrain_rehearsal.recorder import Recorder
from posttrain_rehearsal.transformer_engine import names

KERNELS = names(Recorder())
BF16, FP32 = torch.bfloat16, torch.float32


def product(left, right):
    weight, rows = torch.empty(3, 4, dtype=left), torch.empty(2, 4, dtype=right)
    none = [None] * 3
    return KERNELS["generic_gemm"](weight, True, rows, False, None, *none, None, False, None, False)[0]


def attention(query, value):
    heads = [torch.empty(5, 2, 8, dtype=kind) for kind in (query, query, value)]
    return KERNELS["fused_attn_fwd"](*[None] * 14, torch.tensor([0, 5]), None, *heads)[0]


def rotation(heads, angles):
    return KERNELS["fused_rope_forward"](torch.empty(5, 2, 8, dtype=heads), torch.empty(5, 1, 1, 8, dtype=angles))


@pytest.mark.parametrize("kernel", [product, attention])
def test_factors_have_one_type(kernel):
    assert kernel(BF16, BF16).dtype == BF16
    with pytest.raises(RuntimeError, match=r"several types: torch.bfloat16, torch.float32"):
        kernel(FP32, BF16)


def test_angles_are_fp32():
    assert rotation(BF16, FP32).dtype == BF16
    with pytest.raises(RuntimeError, match=r"FP32, not torch\.bfloat16"):
        rotation(BF16, BF16)

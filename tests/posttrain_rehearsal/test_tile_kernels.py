"""Stand-ins of sparse attention's kernels refuse what the kernels refuse, and count what they compute."""

from __future__ import annotations

import sys

import pytest
import torch

from posttrain_rehearsal import tile_kernels
from posttrain_rehearsal.recorder import Recorder

BF16, INT32, FP32 = torch.bfloat16, torch.int32, torch.float32
TABLE = [
    ("Q", ["rows", 16, 576], BF16),
    ("KV", ["keys", 1, 576], BF16),
    ("Indices", ["rows", 1, 64], INT32),
    ("Output", ["rows", 16, 512], BF16),
    ("Lse", ["rows", 16], FP32),
]


def run(query=(3, 16, 576), kv=(5, 1, 576), indices=(3, 1, 64), dtype=BF16, strided=False):
    recorder = Recorder()
    given = [torch.empty(query, dtype=dtype), torch.empty(kv, dtype=BF16), torch.empty(indices, dtype=INT32)]
    if strided:
        given[1] = torch.empty(10, 1, 576, dtype=BF16)[::2]
    with recorder.phase("train") as phase:
        outputs = tile_kernels._run(recorder, TABLE, (3, 4), given)
    return outputs, phase


def test_a_forward_pass_by_hand():
    (out, lse), phase = run()
    assert (tuple(out.shape), out.dtype, tuple(lse.shape), lse.dtype) == ((3, 16, 512), BF16, (3, 16), FP32)
    # Each of 3 x 16 queries with 64 keys: a product over 576 and one over 512.
    assert (phase.kernels, phase.flops) == (1, 2 * 3 * 16 * 64 * (576 + 512))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"query": (3, 8, 576)}, "Q"),
        ({"indices": (4, 1, 64)}, "Indices"),
        ({"kv": (5, 1, 512)}, "KV"),
        ({"dtype": FP32}, "Q"),
        ({"strided": True}, "KV without gaps"),
    ],
)
def test_other_arguments_are_refused(given, name):
    with pytest.raises(RuntimeError, match=f"wants {name}"):
        run(**given)


def test_cudnn_refuses_other_types(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    tile_kernels.provide(Recorder(), "cudnn")
    forward = sys.modules["flash_mla"].flash_mla_sparse_fwd
    query, kv = torch.empty(3, 64, 576, dtype=BF16), torch.empty(5, 1, 576, dtype=BF16)
    out, _, lse = forward(query, kv, torch.zeros(3, 1, 512, dtype=INT32), 1.0, d_v=512)
    assert (tuple(out.shape), lse.dtype) == ((3, 64, 512), FP32)
    with pytest.raises(RuntimeError, match=r"places of int32, not .*torch\.int64"):
        forward(query, kv, torch.zeros(3, 1, 512, dtype=torch.int64), 1.0, d_v=512)

"""Kernels of sparse attention without a GPU: TileLang's are traced, not compiled; cuDNN's have stand-ins.

The real source of a TileLang kernel runs: its checks, and its argument table, against which our tensors are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from posttrain_rehearsal.recorder import Recorder
from posttrain_rehearsal.transformer_engine import num_bytes, require_same_device

# Matrix products per pair of query and key, over the key's width and the value's: scores and output; in the backward
# pass, gradients of both factors and the scores again (`tilelang_sparse_mla_fwd.py`, `tilelang_sparse_mla_bwd.py`).
FORWARD, BACKWARD = (1, 1), (3, 2)


def provide(recorder: Recorder, name: str) -> None:
    """Install the stand-ins for `trainer.sparse_attention`.

    Args:
        recorder: Counts operations.
        name: The chosen kernel.
    """
    if name == "tilelang":
        _provide_tilelang(recorder)
    elif name == "cudnn":
        _provide_cudnn(recorder)


def _provide_tilelang(recorder: Recorder) -> None:
    try:
        from tilelang.jit import JITImpl
    except ImportError:
        return  # building the model reports what is missing

    def traced(self: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
        function = self.get_tir(*arguments, **options)
        rows = [function.buffer_map[parameter] for parameter in function.params]
        table = [(row.name, [_size(size) for size in row.shape], getattr(torch, str(row.dtype))) for row in rows]
        made = [place % len(table) for place in self.out_idx]
        return lambda *tensors: _run(recorder, table, made, tensors)

    JITImpl.__call__ = traced


def _size(size: Any) -> int | str:
    """Return a size, or the name of one that is only known at the call."""
    return str(size) if hasattr(size, "name") else int(size)


def _run(
    recorder: Recorder,
    table: Sequence[tuple[str, Sequence[int | str], torch.dtype]],
    made: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Check tensors against a kernel's arguments, and return its outputs.

    Args:
        recorder: Counts operations.
        table: Name, sizes and type of each argument.
        made: Positions of the outputs among the arguments.
        tensors: The inputs.
    """
    require_same_device(*tensors)
    taken = [row for place, row in enumerate(table) if place not in made]
    sizes: dict[str, int] = {}
    for (name, shape, dtype), tensor in zip(taken, tensors, strict=True):
        wanted = [sizes.setdefault(size, known) if isinstance(size, str) else size
                  for size, known in zip(shape, tensor.shape, strict=False)]  # fmt: skip
        if len(shape) != tensor.dim() or wanted != [*tensor.shape] or dtype != tensor.dtype:
            found = f"{tensor.dtype} {[*tensor.shape]}"
            raise RuntimeError(f"TileLang's kernel wants {name} as {dtype} {[*shape]}, not {found}")
        if not tensor.is_contiguous():
            raise RuntimeError(f"TileLang's kernel wants {name} without gaps")
    outputs = []
    for place in made:
        _, shape, dtype = table[place]
        known = [sizes[size] if isinstance(size, str) else size for size in shape]
        outputs.append(torch.empty(known, dtype=dtype, device=tensors[0].device))
    given = {row[0]: tensor for row, tensor in zip(taken, tensors, strict=True)}
    is_backward = any(table[place][0] == "dQ" for place in made)
    recorder.kernel(_operations(given, is_backward), num_bytes(*tensors, *outputs))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _operations(given: dict[str, torch.Tensor], is_backward: bool) -> int:
    if not {"Q", "Indices"} <= {*given}:
        return 0
    width = given["Q"].shape[-1]
    of_value = given["dO"].shape[-1] if is_backward else width - 64
    return _of_pairs(given["Q"], given["Indices"], width, of_value, is_backward)


def _of_pairs(query: torch.Tensor, indices: torch.Tensor, width: int, of_value: int, is_backward: bool) -> int:
    """Return the operations for queries [..., N, width] and places [..., K]; masked keys count, too."""
    wide, narrow = BACKWARD if is_backward else FORWARD
    pairs = query.numel() // width * indices.shape[-1]
    return 2 * pairs * (wide * width + narrow * of_value)


def _provide_cudnn(recorder: Recorder) -> None:
    """Install stand-ins for `flash_mla` and `cudnn`, with the two functions that `dsa_cudnn_kernels` calls."""

    def forward(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, d_v: int, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _require(q, kv, indices)
        out, row = q.new_empty(*q.shape[:2], d_v), q.new_empty(q.shape[:2], dtype=torch.float32)
        recorder.kernel(_of_pairs(q, indices, q.shape[-1], d_v, False), num_bytes(q, kv, indices, out))
        return out, row, torch.empty_like(row)

    def backward(
        q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor,
        attn_sink: torch.Tensor, indices: torch.Tensor, **more: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        _require(q, kv, indices)
        require_same_device(q, out, d_out, lse, attn_sink)
        recorder.kernel(_of_pairs(q, indices, q.shape[-1], out.shape[-1], True), 2 * num_bytes(q, kv, indices, out))
        return {"dq": torch.empty_like(q), "dkv": torch.empty_like(kv)}

    flash, cudnn = ModuleType("flash_mla"), ModuleType("cudnn")
    flash.flash_mla_sparse_fwd = forward  # type: ignore[attr-defined]
    cudnn.DSA = SimpleNamespace(sparse_attention_backward_wrapper=backward)  # type: ignore[attr-defined]
    sys.modules |= {"flash_mla": flash, "cudnn": cudnn}


def _require(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> None:
    require_same_device(q, kv, indices)
    types = (q.dtype, kv.dtype, indices.dtype)
    if types != (torch.bfloat16, torch.bfloat16, torch.int32):
        raise RuntimeError(f"FlashMLA and cuDNN take BF16 and places of int32, not {', '.join(map(str, types))}")

"""A stand-in for Transformer Engine's compiled part: shapes, bytes and operations of a step, without values.

Arguments have the order of the Python code of Transformer Engine 2.20 (`cpp_extensions/gemm.py`,
`module/rmsnorm.py`, `optimizers/fused_adam.py`, `cpp_extensions/fused_attn.py`).
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from posttrain_rehearsal.recorder import Recorder


class DType(enum.IntEnum):
    """Transformer Engine's types."""

    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = range(8)


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """The cuDNN attention backend."""

    NVTE_No_Backend, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = -1, 1, 2


_TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
}


def names(recorder: Recorder) -> dict[str, Any]:
    """Return classes and functions by name."""
    constants = {
        "DType": DType,
        "NVTE_Fused_Attn_Backend": NVTE_Fused_Attn_Backend,
        "get_cublasLt_version": lambda: 130100,
        "get_cudnn_version": lambda: 91400,
        "get_num_cublas_streams": lambda: 4,
        "get_fused_attn_backend": lambda *_, **__: (NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""),
    }
    return constants | _products(recorder) | _norms(recorder) | _lists(recorder) | _attention(recorder)


def num_bytes(*tensors: Any) -> int:
    """Return the bytes of the tensors among the arguments."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def require_same_device(*tensors: Any) -> None:
    """Raise if tensors are on different devices, as kernels do."""
    there = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    if len(there) > 1:
        raise RuntimeError(f"a kernel gets tensors of several devices: {', '.join(sorted(map(str, there)))}")


def require_same_type(*tensors: torch.Tensor) -> None:
    """Raise if factors have different types, as cuBLAS and cuDNN do."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise RuntimeError(f"a kernel gets tensors of several types: {', '.join(sorted(map(str, types)))}")


def _products(recorder: Recorder) -> dict[str, Any]:
    def generic_gemm(
        a: torch.Tensor, trans_a: bool, b: torch.Tensor, trans_b: bool, out: Any, quantizer: Any, out_dtype: Any,
        bias: Any, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, **more: Any,
    ) -> tuple[Any, Any, None, None]:  # fmt: skip
        """Return [M, N]. In cuBLAS's column-major order `a` is [N, K] if transposed, `b` is [M, K] if not."""
        require_same_device(a, b, out)
        require_same_type(a, b)
        rows, columns = a.numel() // a.shape[-1], a.shape[-1]
        n, k = (rows, columns) if trans_a else (columns, rows)
        rows, columns = b.numel() // b.shape[-1], b.shape[-1]
        m, inner = (columns, rows) if trans_b else (rows, columns)
        assert inner == k, f"a product of {tuple(a.shape)} and {tuple(b.shape)} ({trans_a}, {trans_b})"
        shape = (m, n) if trans_b else (*b.shape[:-1], n)
        given = torch.empty(shape, dtype=_TORCH.get(out_dtype, a.dtype), device=a.device) if out is None else out
        assert given.numel() == m * n, f"a product of {m} by {n} into {tuple(given.shape)}"
        recorder.kernel(2 * m * n * k, num_bytes(a, b, given))
        return given, b.new_empty(m) if grad and bias is not None else None, None, None

    def te_general_grouped_gemm(
        a: list[Any], trans_a: bool, b: list[Any], trans_b: bool, out: Any, out_dtype: Any, m_splits: list[int],
        bias: Any, bias_type: Any, single_output: bool, *rest: Any, **more: Any,
    ) -> Any:  # fmt: skip
        outs = out[0].split(m_splits) if single_output else out
        for left, right, into in zip(a, b, outs, strict=True):
            if left.numel() and right.numel():
                generic_gemm(left, trans_a, right, trans_b, into, None, out_dtype, None, None, False, None, False)
        return bias

    return {"generic_gemm": generic_gemm, "te_general_grouped_gemm": te_general_grouped_gemm}


def _norms(recorder: Recorder) -> dict[str, Any]:
    def rmsnorm_fwd(x: torch.Tensor, weight: torch.Tensor, eps: float, out: Any, *rest: Any) -> tuple[Any, None, Any]:
        require_same_device(x, weight)
        result = torch.empty_like(x) if out is None else out
        recorder.kernel(0, num_bytes(x, result))
        return result, None, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)

    def rmsnorm_bwd(dy: torch.Tensor, x: torch.Tensor, rsigma: Any, weight: torch.Tensor, *rest: Any) -> Any:
        recorder.kernel(0, num_bytes(dy, x, x))
        return torch.empty_like(x), torch.empty_like(weight)

    def rotated(heads: torch.Tensor, freqs: torch.Tensor, *rest: Any) -> torch.Tensor:
        require_same_device(heads, freqs)
        if freqs.dtype != torch.float32:
            raise RuntimeError(f"rotary angles are FP32, not {freqs.dtype}")
        recorder.kernel(0, num_bytes(heads, heads))
        return torch.empty_like(heads)

    rotations = dict.fromkeys(("fused_rope_forward", "fused_rope_backward"), rotated)
    return {"rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd} | rotations


def _lists(recorder: Recorder) -> dict[str, Any]:
    def change_all(chunk: int, noop: Any, lists: Any, *rest: Any) -> None:
        for row in lists:
            require_same_device(*row, lists[0][0])
        recorder.kernel(0, num_bytes(*(tensor for row in lists for tensor in row)))

    def l2norm(chunk: int, noop: Any, lists: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        change_all(chunk, noop, lists)
        device = lists[0][0].device
        return torch.ones(1, device=device), torch.ones(
            len(lists[0]) if rest and rest[-1] is True else 0, device=device
        )

    norms = dict.fromkeys(("multi_tensor_l2norm", "multi_tensor_unscale_l2norm"), l2norm)
    changes = (
        "multi_tensor_scale",
        "multi_tensor_scale_tensor",
        "multi_tensor_adam",
        "multi_tensor_adam_param_remainder",
    )
    return norms | dict.fromkeys(changes, change_all)


def _attention(recorder: Recorder) -> dict[str, Any]:
    def fused_attn_fwd(*given: Any) -> list[torch.Tensor]:
        boundaries, (q, k, v) = given[14:16], given[16:19]
        require_same_device(q, k, v)
        require_same_type(q, k, v)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        statistics = torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=q.device)
        recorder.kernel(_causal_operations(recorder, boundaries, q, v), num_bytes(q, k, v, out))
        return [out, statistics, torch.empty(2, dtype=torch.int64, device=q.device)]

    def fused_attn_bwd(*given: Any) -> list[Any]:
        boundaries, (q, k, v) = given[17:19], given[19:22]
        recorder.kernel(5 * _causal_operations(recorder, boundaries, q, v) // 2, 2 * num_bytes(q, k, v, q))
        return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None]

    def reordered(x: torch.Tensor, boundaries: torch.Tensor, *sizes: int) -> torch.Tensor:
        require_same_device(x, boundaries)
        recorder.kernel(0, 2 * num_bytes(x))
        return torch.empty_like(x)

    def copied(into: torch.Tensor, part: torch.Tensor, *boundaries: torch.Tensor) -> None:
        require_same_device(into, part, *boundaries)
        recorder.kernel(0, 2 * num_bytes(part))

    orders = dict.fromkeys(("thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order"), reordered)
    copies = {"thd_copy_valid_tokens_from_per_split_to_rank_local": copied}
    return {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd} | orders | copies


def _causal_operations(recorder: Recorder, boundaries: Any, q: torch.Tensor, v: torch.Tensor) -> int:
    """Return the operations of two products per visible pair of query and key, within each sequence.

    A sequence's last query sees all of its keys, so x queries and y keys have x (2 y - x) / 2 pairs.
    """
    queries, keys = (recorder.values(places) for places in boundaries)
    if queries is None or keys is None:
        pairs = q.shape[0] ** 2
    else:
        num_queries, num_keys = queries.diff().long(), keys.diff().long()
        pairs = int((num_queries * (2 * num_keys - num_queries)).sum())
    return pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])

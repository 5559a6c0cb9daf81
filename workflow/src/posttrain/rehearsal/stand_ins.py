"""What is not there without a GPU, and what stands in for it: compiled code of Transformer Engine and DeepEP, Triton's
kernels, torch's compiler, random state and memory figures of devices.

Each stand-in gives tensors of the shapes that the real thing gives, and tells the recorder what it would compute. All
are in `STAND_INS`, with what they hide.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from posttrain.rehearsal.recorder import Recorder

STAND_INS = {
    "transformer_engine_torch": "products, norms, attention, Adam of Transformer Engine: shapes and operations, no values",
    "triton": "kernels of Triton are not started: their outputs exist, without values",
    "torch.compile": "what the compiler would fuse runs operation by operation: one more temporary at a time",
    "process groups": "large tensors are not sent; messages that have values are, between the ranks that are rehearsed",
    "router": "which experts a token goes to is drawn, not computed",
    "random state": "devices have none; dropout is 0",
    "streams": "all work on a device happens at once and in the order of the calls",
}


def install(recorder: Recorder) -> None:
    """Put all stand-ins in place; before Megatron is imported."""
    _provide_transformer_engine(recorder)
    _provide_deepep(recorder)
    _provide_triton(recorder)
    _provide_devices(recorder)


# ---- Transformer Engine ----


class _DType(enum.IntEnum):
    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = range(8)


class _Backend(enum.IntEnum):
    NVTE_No_Backend, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = -1, 1, 2


_TORCH = {
    _DType.kFloat32: torch.float32,
    _DType.kFloat16: torch.float16,
    _DType.kBFloat16: torch.bfloat16,
    _DType.kByte: torch.uint8,
    _DType.kInt32: torch.int32,
}


class _Compiled(ModuleType):
    """Has the functions below, and an empty answer to all other names; classes stay classes, for annotations."""

    DType = _DType
    NVTE_Fused_Attn_Backend = _Backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


def _provide_transformer_engine(recorder: Recorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that its compiled part is missing
        import transformer_engine
    from transformer_engine import common

    compiled = _Compiled("transformer_engine_torch")
    for name, function in _functions(recorder).items():
        setattr(compiled, name, function)
    sys.modules["transformer_engine_torch"] = compiled
    common.load_framework_extension = lambda framework: None
    transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")


def _functions(recorder: Recorder) -> dict[str, Any]:
    def generic_gemm(
        a: torch.Tensor, trans_a: bool, b: torch.Tensor, trans_b: bool, out: Any, quantizer: Any, out_dtype: Any,
        bias: Any, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, **more: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """[.., M, K] of `b` by [N, K] of `a`, in cuBLAS's order: columns first."""
        rows_a, columns_a = a.numel() // a.shape[-1], a.shape[-1]
        rows_b, columns_b = b.numel() // b.shape[-1], b.shape[-1]
        n, k = (rows_a, columns_a) if trans_a else (columns_a, rows_a)
        m, inner = (columns_b, rows_b) if trans_b else (rows_b, columns_b)
        assert inner == k, f"a product of {tuple(a.shape)} and {tuple(b.shape)} ({trans_a}, {trans_b})"
        _same_device(a, b, out)
        shape = (m, n) if trans_b else (*b.shape[:-1], n)
        given = out if out is not None else torch.empty(shape, dtype=_TORCH.get(out_dtype, a.dtype), device=a.device)
        assert given.numel() == m * n, f"a product of {m} by {n} into {tuple(given.shape)}"
        recorder.kernel(2 * m * n * k, _size(a, b, given))
        return given, (torch.empty(n, dtype=a.dtype, device=a.device) if grad and bias is not None else None), None, None

    def te_general_grouped_gemm(
        a: list[Any], trans_a: bool, b: list[Any], trans_b: bool, out: Any, out_dtype: Any, m_splits: list[int],
        bias: Any, bias_type: Any, single_output: bool, *rest: Any, **more: Any,
    ) -> Any:  # fmt: skip
        outs = out if not single_output else out[0].split(m_splits) if m_splits else [out[0]]
        for left, right, into in zip(a, b, outs, strict=True):
            if left.numel() and right.numel():
                generic_gemm(left, trans_a, right, trans_b, into, None, out_dtype, None, None, False, None, False)
        return bias

    def rmsnorm_fwd(x: torch.Tensor, weight: torch.Tensor, eps: float, out: Any, quantizer: Any, otype: Any, *rest: Any):
        _same_device(x, weight)
        result = torch.empty_like(x) if out is None else out
        recorder.kernel(0, _size(x, result))
        return result, None, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)

    def rmsnorm_bwd(dy: torch.Tensor, x: torch.Tensor, rsigma: Any, weight: torch.Tensor, *rest: Any):
        recorder.kernel(0, _size(dy, x, x))
        return torch.empty_like(x), torch.empty_like(weight)

    def multi_tensor_l2norm(chunk: int, noop: Any, lists: Any, per_tensor: bool = False):
        recorder.kernel(0, _size(*lists[0]))
        device = lists[0][0].device
        return torch.ones(1, device=device), torch.ones(len(lists[0]) if per_tensor else 0, device=device)

    def multi_tensor(chunk: int, noop: Any, lists: Any, *rest: Any) -> None:
        for row in lists:
            _same_device(*row, lists[0][0])
        recorder.kernel(0, _size(*(tensor for row in lists for tensor in row)))

    return {
        "generic_gemm": generic_gemm,
        "te_general_grouped_gemm": te_general_grouped_gemm,
        "rmsnorm_fwd": rmsnorm_fwd,
        "rmsnorm_bwd": rmsnorm_bwd,
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_unscale_l2norm": multi_tensor_l2norm,
        "multi_tensor_scale": multi_tensor,
        "multi_tensor_adam": multi_tensor,
        "multi_tensor_adam_param_remainder": multi_tensor,
        "get_cublasLt_version": lambda: 130100,
        "get_cudnn_version": lambda: 91400,
        "get_num_cublas_streams": lambda: 4,
    } | _attention(recorder)


def _attention(recorder: Recorder) -> dict[str, Any]:
    def fused_attn_fwd(*given: Any) -> list[torch.Tensor]:
        longest_q, longest_kv, causal = given[0], given[1], True
        q, k, v = given[16:19]
        _same_device(q, k, v)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        statistics = torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=q.device)
        recorder.kernel(_attention_flops(recorder, given[14], q, k, v), _size(q, k, v, out))
        return [out, statistics, torch.empty(2, dtype=torch.int64, device=q.device)]

    def fused_attn_bwd(*given: Any) -> list[torch.Tensor]:
        q, k, v = given[19:22]
        recorder.kernel(5 * _attention_flops(recorder, given[17], q, k, v) // 2, 2 * _size(q, k, v, q))
        return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None]

    return {
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
        "get_fused_attn_backend": lambda *_, **__: _Backend.NVTE_F16_arbitrary_seqlen,
    }


def _attention_flops(recorder: Recorder, boundaries: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the operations of causal attention inside each sequence of a row."""
    known = recorder.values(boundaries)
    squares = int((known.diff().long() ** 2).sum()) if known is not None else q.shape[0] ** 2
    return squares * q.shape[-2] * (q.shape[-1] + v.shape[-1])


# ---- DeepEP ----


class _Handle:
    """What DeepEP keeps of a dispatch: tokens that were sent, and received."""

    def __init__(self, sent: int, received: int):
        self.sent, self.received = sent, received


class _Event:
    def __init__(self, *_: Any):
        pass

    def current_stream_wait(self) -> None:
        """All is done already."""


class _Sizes:
    """DeepEP's buffers are none of torch's memory: `Assumptions.deepep` stands for them."""

    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def _provide_deepep(recorder: Recorder) -> None:
    class Buffer:
        """Every rank of the group sends to this one what this one sends to itself."""

        def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int):
            self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

        get_dispatch_config = get_combine_config = staticmethod(lambda size: _Sizes())
        set_num_sms = staticmethod(lambda count: None)

        def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int, **_: Any):
            return None, None, num_experts, None, None

        def dispatch(self, x: torch.Tensor, topk_idx: Any = None, handle: Any = None, num_tokens_per_expert: Any = None, **more: Any):  # fmt: skip
            if handle is not None:
                self._note("dispatch", x, handle.received)
                return x.new_empty(handle.received, x.shape[1]), None, None, None, None, _Event()
            _same_device(x, topk_idx)
            size, rank = self.group.size(), self.group.rank()
            local = num_tokens_per_expert // size
            known = recorder.values(topk_idx)
            assert known is not None, "which experts a token goes to is drawn"
            mine = known - rank * local
            is_mine = (mine >= 0) & (mine < local)
            counts = [size * int((mine == expert).sum()) for expert in range(local)]
            received = size * int(is_mine.any(-1).sum())
            there = torch.where(is_mine, mine, -1)[is_mine.any(-1)].repeat(size, 1)
            self._note("dispatch", x, received)
            weights = torch.empty(received, topk_idx.shape[1], dtype=torch.float32, device=x.device)
            handle = _Handle(len(x), received)
            # -1 stands for an expert of another rank.
            return x.new_empty(received, x.shape[1]), there.to(x.device), weights, counts, handle, _Event()

        def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any = None, **more: Any):
            assert len(x) == handle.received, f"{len(x)} rows come back of {handle.received}"
            self._note("combine", x, handle.sent)
            weights = None if topk_weights is None else topk_weights.new_empty(handle.sent, topk_weights.shape[1])
            return x.new_empty(handle.sent, x.shape[1]), weights, _Event()

        def _note(self, name: str, x: torch.Tensor, count: int) -> None:
            recorder.collective(f"deepep {name}", self.group, [x], count * x.shape[1] * x.element_size())

    deep_ep, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    deep_ep.Buffer, deep_ep.utils = Buffer, utils  # type: ignore[attr-defined]
    utils.EventHandle = utils.EventOverlap = _Event  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": deep_ep, "deep_ep.utils": utils}


def _size(*tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def _same_device(*tensors: Any) -> None:
    """Refuse what a kernel would: tensors that lie elsewhere."""
    there = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    if len(there) > 1:
        raise RuntimeError(f"a kernel gets tensors of several devices: {sorted(map(str, there))}")


# ---- Triton, torch ----


def _provide_triton(recorder: Recorder) -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
        _same_device(*tensors)
        recorder.kernel(0, sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    JITFunction.run = Autotuner.run = start


def _provide_devices(recorder: Recorder) -> None:
    cuda = torch.cuda
    cuda._lazy_init = cuda.set_device = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *_, **__: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132
    )
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "simulated"
    cuda.mem_get_info = lambda *_: (141 << 30, 141 << 30)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    tracker = megatron_random.CudaRNGStatesTracker
    tracker.add, tracker.fork = lambda *_: None, lambda *_: contextlib.nullcontext()
    # Module.to would swap a parameter in place, and cannot while the mode knows it.
    torch.nn.Module._apply = _convert


def _convert(module: Any, change: Any, recurse: bool = True) -> Any:
    """Move or cast a module."""
    for child in module.children():
        _convert(child, change)
    for name, old in module._parameters.items():
        if old is not None:
            new = torch.nn.Parameter(change(old.detach()), requires_grad=old.requires_grad)
            new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module

"""Megatron Core on a machine without CUDA.

Megatron Core assumes a GPU in a few dozen places that do not affect the mathematics: where a tensor is allocated, which
stream copies it, which random generator is saved. `enable_cpu()` patches each of them, so that a laptop runs the same
trainer as the cluster. On a machine with CUDA, the GPUs must be hidden.

Each function below states the obstacle that it removes. Checked against megatron-core 0.19.2 and torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch.optim.adamw import adamw as torch_adamw
from torch.utils._device import _device_constructors

from posttrain.rl.algorithm.logprobs import add_product
from posttrain.rl.megatron_backend.cpu_functions import embedding, linear

CPU = torch.device("cpu")
_enabled = False


def enable_cpu() -> None:
    """Let Megatron Core build, train and save models in host memory. Call it before building any of its modules.

    Idempotent.

    Raises:
        RuntimeError: Torch sees GPUs, which Megatron would use in some places.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "hardware.device=cpu, and torch sees GPUs: set CUDA_VISIBLE_DEVICES to nothing, as the plan does for "
            "what it starts, or choose another hardware="
        )
    torch.compiler.set_stance("force_eager")  # small fused functions: not worth a C++ compiler on a user's machine
    _replace_device_queries()
    _replace_random_state()
    _redirect_factories()
    _keep_split_sizes_plain()
    _exchange_parts_of_any_size()
    _skip_collectives_without_peers()
    _skip_regions_without_peers()
    _accumulate_weight_gradients()
    _provide_fused_adam()
    _accept_cpu_parameters()
    _do_without_transformer_engine()
    _enabled = True


def _do_without_transformer_engine() -> None:
    """Routers and optimizer check whether Transformer Engine is installed, not whether to use it."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    for part in (clip_grads, optimizer):
        part.multi_tensor_applier = utils.local_multi_tensor_applier
        part.multi_tensor_scale_impl = _scale_tensors
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


def _scale_tensors(_: int, __: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], scale: float) -> None:
    """Write the scaled tensors of a list to those of another; gradients are clipped in place."""
    for source, target in zip(*tensors, strict=True):
        torch.mul(source, scale, out=target)


class _Inert:
    """Dummy stream or event: accepts every call, does nothing, and is always finished."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Do nothing."""

    wait_event = record = synchronize = wait = wait_stream

    def record_event(self, *_: Any) -> _Inert:
        """Return a finished event."""
        return self

    def query(self) -> bool:
        """Return True: the event is finished."""
        return True


def _replace_device_queries() -> None:
    """Rotary embedding, router and data-parallel buffers query the current CUDA device and its streams."""
    stream = _Inert()
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.Stream = torch.cuda.Event = _Inert  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def _replace_random_state() -> None:
    """Recomputation and the model-parallel RNG tracker save and set the CUDA generator; use torch's CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _redirect_factories() -> None:
    """Optimizer, gradient clipping and schedules pass `device="cuda"`; allocate such tensors in host memory.

    `with torch.device(...)` recognises factory functions by a list that torch builds at first use and then caches.
    Build the list before patching, so that it contains torch's functions.
    """
    _device_constructors()
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _keep_split_sizes_plain() -> None:
    """The all-to-all dispatcher converts split sizes to numpy only if they are on a GPU; convert CPU sizes too."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _exchange_parts_of_any_size() -> None:
    """Ranks that share an expert hold different numbers of tokens, but gloo gathers and scatters only equal sizes.

    Use gloo's all-to-all instead, which takes any sizes.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(part: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, use_global_buffer)
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        sent = part.repeat(group.size(), *[1] * (part.dim() - 1))
        torch.distributed.all_to_all_single(whole, sent, sizes, [len(part)] * group.size(), group)
        return whole

    def add_up_parts(whole: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, sizes, use_global_buffer)
        own = sizes[group.rank()]
        parts = whole.new_empty(group.size(), own, *whole.shape[1:])
        received = [own] * group.size()
        torch.distributed.all_to_all_single(parts.flatten(0, 1), whole.contiguous(), received, sizes, group)
        return parts.sum(0)

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = add_up_parts


def _skip_collectives_without_peers() -> None:
    """Of one data-parallel rank, gloo copies whole weight and gradient buffers onto themselves."""
    from megatron.core.distributed import param_and_grad_buffer

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, _if_there_are_peers(getattr(param_and_grad_buffer, name)))


def _skip_regions_without_peers() -> None:
    """Of one tensor-parallel rank, the regions around linear layers are functions that do nothing, twice a layer."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils, shared_experts

    for part in (layers, moe_utils, shared_experts):
        for name in ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"):
            if hasattr(part, name):
                setattr(part, name, _unless_alone(getattr(part, name)))


def _unless_alone(region: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(region)
    def enter(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        group = group or parallel_state.get_tensor_model_parallel_group()
        return tensor if group.size() == 1 else region(tensor, group=group)

    return enter


def _if_there_are_peers(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def exchange(output: torch.Tensor, given: torch.Tensor, *args: Any, group: Any, **options: Any) -> Any:
        if group.size() == 1:
            assert output.data_ptr() == given.data_ptr(), "a shard of one rank is the buffer itself"
            return _Inert()
        return collective(output, given, *args, group=group, **options)

    return exchange


def _accumulate_weight_gradients() -> None:
    """Linear layers add weight gradients to Megatron's buffers with a kernel of Apex; use torch's product instead.

    Without it, a gradient is computed in memory of its own and then added. The same holds for the embedding.
    """
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add_weight_gradient)
    layers._grad_accum_fusion_available = True
    layers.F = _EmbeddingFunctions()
    layers.linear_with_grad_accumulation_and_async_allreduce = _slim_linear(
        layers.linear_with_grad_accumulation_and_async_allreduce
    )


class _EmbeddingFunctions:
    """`torch.nn.functional` with another `embedding`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def embedding(self, places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of a matrix."""
        is_trained = weight.requires_grad and getattr(weight, "main_grad", None) is not None
        return embedding(places, weight) if is_trained else F.embedding(places, weight)


def _slim_linear(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a linear layer's function that does without Megatron's where there is nothing to exchange."""

    @functools.wraps(original)
    def call(input: torch.Tensor, weight: torch.Tensor, bias: Any, **options: Any) -> torch.Tensor:
        exchanges = options["allreduce_dgrad"] or options["sequence_parallel"]
        adds = options["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
        if exchanges or not adds or bias is not None or options.get("grad_output_buffer") is not None:
            return original(input, weight, bias, **options)
        return linear(input, weight)

    return call


def _add_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add grad_output^T @ total_input to the FP32 gradient of a weight."""
    add_product(main_grad, grad_output.t(), total_input)


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay and the interface of Apex's and Transformer Engine's FusedAdam.

    Those keep the step count in the parameter group, which Megatron's distributed checkpoint relies on; torch's AdamW
    keeps one per parameter, which that checkpoint cannot load. The arithmetic is torch's.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        adam_w_mode: Must be true; FusedAdam's other mode adds the decay to the gradient.
        capturable: Must be false; true would keep the step count on the device for CUDA graphs.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (ICLR 2019), algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ):
        assert adam_w_mode, "only decoupled weight decay is provided"
        assert not capturable, "there are no CUDA graphs"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self._state_of(p) for p in parameters]
            # The functional form increments the count itself, so pass the previous step's count.
            count = torch.tensor(float(group["step"] - 1))
            torch_adamw(
                parameters,
                [p.grad for p in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [count.clone() for _ in parameters],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                fused=True,
            )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _provide_fused_adam() -> None:
    """Without Apex and Transformer Engine, Megatron uses an optimizer that cannot be loaded from a checkpoint."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def _accept_cpu_parameters() -> None:
    """The optimizer accepts only type names such as "torch.cuda.FloatTensor" for parameters; accept CPU types."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for owner, name in ((DistributedOptimizer, "__init__"), (DistributedOptimizer, "step"), (ChainedOptimizer, "step")):
        setattr(owner, name, _with_cuda_type_names(getattr(owner, name)))


def _with_cuda_type_names(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]

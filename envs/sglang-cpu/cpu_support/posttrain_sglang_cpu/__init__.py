"""SGLang plugin: serve dense, MoE, MLA and gated-delta-net models on `--device cpu --attention-backend torch_native`.

SGLang calls `activate` in each of its processes before it builds anything (entry point group
`sglang.srt.plugins`). Each function below removes one obstacle of SGLang 0.5.23 and names it.
Nothing happens unless SGLANG_USE_CPU_ENGINE=1, SGLang's own switch for CPU serving.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from posttrain_sglang_cpu.batch_invariant import enable_batch_invariant_operators


def activate() -> None:
    """Register everything below with SGLang."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    use_absorbed_attention_for_mla()
    allow_plain_rope_for_mla()
    allow_deterministic_inference()
    hand_over_caches_without_events()
    normalise_delta_nets()
    gate_shared_experts()


def use_absorbed_attention_for_mla() -> None:
    """Make MLA layers use the absorbed form of attention in prefill as well as in decode.

    Obstacle: a backend without an entry of its own gets Triton's choice, which computes prefill
    with separate heads (head size nope + rope). `torch_native` reads keys and values back from
    the cache, where MLA keeps the latent (kv_lora + rope), and fails on the shapes.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)


def allow_plain_rope_for_mla() -> None:
    """Give MLA layers on a CPU a rotary embedding when the model does not scale it.

    Obstacle: `get_rope_cpu` asserts that the scaling is `deepseek_yarn`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
        _get_rope_cpu_or_plain,
        HookType.AROUND,
    )


def _get_rope_cpu_or_plain(
    get_rope_cpu: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    common = (head_size, rotary_dim, max_position, base, is_neox_style)
    if not rope_scaling or rope_scaling.get("rope_type") in (None, "default"):
        return get_rope(*common, None, dtype, partial_rotary_factor)
    return get_rope_cpu(*common, rope_scaling, dtype, partial_rotary_factor, device)


def hand_over_caches_without_events() -> None:
    """Let an engine that only prefills hand over its KV cache by Mooncake, where that is installed.

    Obstacle: it would copy the numbers of the pages through pinned memory, beside a CUDA event.
    """
    if importlib.util.find_spec("mooncake"):
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False


def normalise_delta_nets() -> None:
    """Normalise and gate a delta net's output in torch.

    Obstacle: without AMX, `RMSNorm` of `layernorm_gated` starts a Triton kernel, which needs a GPU.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated"
    HookRegistry.register(target, _rms_norm_gated, HookType.REPLACE)


def _rms_norm_gated(
    *, x: Any, weight: Any, bias: Any, z: Any, eps: float, activation: str, is_rms_norm: bool, **layout: Any
) -> Any:
    """Return norm(x) * silu(z): [..., width] in FP32, rounded once."""
    import torch

    assert is_rms_norm
    assert activation in ("swish", "silu")
    assert layout == {"group_size": None, "norm_before_gate": True}
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (scaled * torch.nn.functional.silu(z.reshape(x.shape).float())).to(x.dtype)


def gate_shared_experts() -> None:
    """Gate the output of a shared expert in torch.

    Obstacle: `Qwen2MoeSparseMoeBlock` does so with a Triton kernel, which needs a GPU.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"
    HookRegistry.register(target, _gated, HookType.REPLACE)


def _gated(hidden_states: Any, gate_weight: Any, shared_output: Any, output: Any, *, do_add: bool) -> None:
    """Write sigmoid(hidden_states @ gate_weight) * shared_output, plus `output` on request, to `output`."""
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    gated = gate * shared_output.float()
    output.copy_(output.float() + gated if do_add else gated)


def allow_deterministic_inference() -> None:
    """Let `--enable-deterministic-inference` run on a CPU: it switches `sampling_seed` on.

    Obstacles: the lists of backends it accepts lack `torch_native`, and its batch-invariant
    operators are Triton kernels, which need a GPU. Ours are in `batch_invariant`.

    The second list also says that prefix caching keeps the bits. It does not here (attention over
    a longer prompt sums in another order), but MLA models are refused without that entry:
    start such a server with `--disable-radix-cache`.
    """
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        enable_batch_invariant_operators,
        HookType.REPLACE,
    )

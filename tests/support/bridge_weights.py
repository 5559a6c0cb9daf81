"""What megatron-bridge makes of a Hub checkpoint: a program for its own environment (`make env-bridge`).

    bridge_weights.py '{"HF_FOLDER": "OUT.safetensors", ...}'

The models are those that the bridge describes, of its own layers, with its own map of names; what is written is the
state that Megatron Core would put into a checkpoint, under its keys. Weights that nothing is loaded into stay NaN.

Stand-ins, because there is neither a GPU nor Transformer Engine: its modules as far as they hold weights, and nothing
of what they compute. Everything else of that package has a name and no meaning.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

# ---- Transformer Engine ----


class Linear(nn.Module):
    """Weight and bias under the names that the package gives them; `_extra_state` is there and empty."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: torch.dtype,
        parallel_mode: str | None = None,
        **_: Any,
    ):
        super().__init__()
        self.use_bias, self.parallel_mode = bias, parallel_mode
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype))

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, params_dtype: torch.dtype, normalization: str, **rest: Any):
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, params_dtype=params_dtype, **rest)
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, dtype=params_dtype))


class GroupedLinear(nn.Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype, **_: Any
    ):
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        for index in range(num_gemms):
            self.register_parameter(
                f"weight{index}", nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            )

    get_extra_state = Linear.get_extra_state


class RMSNorm(nn.Module):
    def __init__(self, normalized_shape: int, params_dtype: torch.dtype, **_: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype))


class LayerNorm(RMSNorm):
    def __init__(self, normalized_shape: int, params_dtype: torch.dtype, **_: Any):
        super().__init__(normalized_shape, params_dtype)
        self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype))


class DotProductAttention(nn.Module):
    def __init__(self, *_: Any, **__: Any):
        super().__init__()


MODULES = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
MEANT: dict[str, dict[str, Any]] = {
    "transformer_engine.pytorch": {module.__name__: module for module in MODULES},
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": lambda *_, **__: (None, None)},
}


class TransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `transformer_engine` and every module below it."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        mine = name.split(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Named(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "2.20.2"  # the GPU image's
        module.__dict__.update(MEANT.get(module.__name__, {}))


class Named(ModuleType):
    """Has whatever is asked of it: a class where the name is one's, for annotations and subclasses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


# ---- the bridge ----


def main() -> None:
    """Write what each folder becomes, and print the classes that the bridge does not know as JSON."""
    sys.meta_path.insert(0, TransformerEngine())
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = MagicMock()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    leave_out_the_norm_before_q_proj()
    known, unknown = AutoBridge.list_supported_models(), []
    for folder, output in json.loads(sys.argv[1]).items():
        (name,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        if name in known:
            convert(Path(folder), Path(output))
        else:
            unknown.append(name)
    print(json.dumps(unknown))


def convert(folder: Path, output: Path) -> None:
    """Load a checkpoint into the model that the bridge describes, and write its state."""
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection
    from safetensors.torch import save_file

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.use_cpu_initialization, provider.perform_initialization = True, False
    provider.gradient_accumulation_fusion = False
    provider.moe_token_dispatcher_type, provider.moe_shared_expert_overlap = "allgather", False
    provider.mtp_num_layers = getattr(bridge.hf_pretrained.config, "num_nextn_predict_layers", 0) or None
    if provider.multi_latent_attention:
        provider.transformer_layer_spec = partial(with_norms_apart, provider.transformer_layer_spec)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    bridge.load_hf_weights([model])
    save_file(state_of(model), output)


def with_norms_apart(layers: Callable[..., Any], config: Any, vp_stage: int | None = None) -> Any:
    """Return the bridge's layers with latent attention in the other form that its map of names knows.

    Transformer Engine's joins three norms to the linear map behind them; a checkpoint of ours has all of them apart.
    """
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    block = layers(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.keywords["submodules"]
        if attention.linear_kv_up_proj is TELayerNormColumnParallelLinear:
            attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
            attention.kv_layernorm = TENorm
            if config.q_lora_rank:
                attention.q_layernorm = TENorm
        if getattr(mlp, "linear_fc1", None) is TELayerNormColumnParallelLinear:
            mlp.linear_fc1, layer.submodules.pre_mlp_layernorm = TEColumnParallelLinear, TENorm
    return block


def leave_out_the_norm_before_q_proj() -> None:
    """Build latent attention without a query latent as the Hub has it.

    Megatron Core puts a norm before that map, which no checkpoint has; the bridge knows no name for it and ends there.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    resolve = QKNormConfigResolver.resolve

    def without(resolver: QKNormConfigResolver) -> dict[str, Any]:
        return resolve(resolver) | ({} if resolver.has_q_lora else {"linear_q_proj": resolver.linear_impl})

    QKNormConfigResolver.resolve = without


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return key -> tensor of a checkpoint of the model, shards put together."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    apply_factories(state)
    tensors: dict[str, torch.Tensor] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            whole = tensors.setdefault(shard.key, torch.full(shard.global_shape, float("nan"), dtype=shard.dtype))
            sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
            box = tuple(slice(start, start + size) for start, size in zip(shard.global_offset, sizes, strict=True))
            whole[box] = shard.data.detach().reshape(sizes)
    return tensors


if __name__ == "__main__":
    main()

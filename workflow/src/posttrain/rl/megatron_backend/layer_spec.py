"""Selects the modules of a decoder layer for every model family, by the model's dimensions.

One spec serves Megatron's local modules and Transformer Engine. Norms are never fused into the next linear layer: the
indexer needs the normalised latent, and parameter names stay the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from posttrain.rl.megatron_backend.arguments import LATENT_NORM_EPS
from posttrain.rl.megatron_backend.gated_delta_net.layer import GatedDeltaNet
from posttrain.rl.megatron_backend.glm5.attention import Glm5SelfAttention, SparseCoreAttention
from posttrain.rl.megatron_backend.glm5.norm import RMSNorm
from posttrain.rl.megatron_backend.glm5.router import OneExpertRouter
from posttrain.rl.megatron_backend.latent_attention import LatentAttention
from posttrain.rl.megatron_backend.packed_attention import PackedAttention

# Checkpoint names of norms; checkpoints follow Transformer Engine's fused layers, which contain the norm.
ATTENTION_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
DELTA_NORM = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def block_spec(config: TransformerConfig, use_transformer_engine: bool, chunk: int = 0) -> TransformerBlockSubmodules:
    """Return the layers of a chunk of this rank's pipeline stage, dense or MoE by `moe_layer_freq`.

    Args:
        config: Megatron's configuration.
        use_transformer_engine: Linear layers, experts, norms and dense attention of Transformer Engine (CUDA) instead
            of Megatron's own and ours.
        chunk: The chunk's number on this rank.
    """
    backend = TESpecProvider() if use_transformer_engine else _Local()
    first = get_transformer_layer_offset(config, chunk)
    numbers = range(first, first + get_num_layers_to_build(config, chunk))
    layers = [_layer_spec(config, backend, i) for i in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=backend.layer_norm(rms_norm=True))


class ForgetfulMoELayer(MoELayer):
    """Megatron's MoE layer without what its dispatcher keeps until the next pass."""

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Add the shared experts' output, and drop tensors that only this pass needed.

        The last call of a pass, recomputed ones included. The autograd graph of routing probabilities keeps the layer's
        recomputed input and its gradient alive: 2 GiB in GLM-5's first stage on 16 nodes.
        """
        whole = super().postprocess(output, shared_expert_output)
        dispatcher = self.token_dispatcher
        for keeper in (dispatcher, getattr(dispatcher, "_comm_manager", dispatcher)):
            for name, value in vars(keeper).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(keeper, name, None)
        return whole


class _Local(LocalSpecProvider):
    """Megatron's local modules with our norm and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer is MoE; Megatron gives a number instead of a list if all layers are alike."""
    frequencies = config.moe_layer_freq
    return bool(config.num_moe_experts and (frequencies == 1 or frequencies[layer]))


def _is_delta_net(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer is a gated delta net; the list is given to models that have some."""
    return bool(config.linear_attention_freq and config.linear_attention_freq[layer])


def _layer_spec(config: TransformerConfig, backend: BackendSpecProvider, layer: int) -> ModuleSpec:
    """Return the spec of a layer, counted from 0."""
    norm, is_moe = backend.layer_norm(rms_norm=True), _has_experts(config, layer)
    attention, norm_names = _attention(config, backend, layer)
    mlp_names = {} if is_moe or config.multi_latent_attention else MLP_NORM
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_moe_spec(config, backend) if is_moe else _dense_mlp_spec(backend),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=norm_names | mlp_names,
        ),
    )


def _attention(
    config: TransformerConfig, backend: BackendSpecProvider, layer: int
) -> tuple[ModuleSpec, dict[str, str]]:
    """Return a layer's attention, and its norm's names in checkpoints."""
    if config.multi_latent_attention:
        return _latent_attention(config, backend), {}
    if _is_delta_net(config, layer):
        linears = {
            "column_parallel_linear": backend.column_parallel_linear(),
            "row_parallel_linear": backend.row_parallel_linear(),
        }
        return ModuleSpec(module=GatedDeltaNet, params=linears), DELTA_NORM
    return _grouped_attention(config, backend), ATTENTION_NORM


def _grouped_attention(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    norm = partial(_latent_norm, backend.layer_norm(rms_norm=True))
    query: dict[str, Any] = {"linear_q_proj": column, "q_layernorm": None}
    if config.q_lora_rank is not None:
        query = {"linear_q_down_proj": column, "linear_q_up_proj": column, "q_layernorm": norm}
    is_sparse = config.dsa_indexer_topk
    return ModuleSpec(
        module=Glm5SelfAttention if is_sparse else LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            **query,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=SparseCoreAttention if is_sparse else backend.core_attention(),
            linear_proj=row,
            kv_layernorm=norm,
        ),
    )


def _latent_norm(
    norm: Callable[..., torch.nn.Module], config: TransformerConfig, hidden_size: int, **_: Any
) -> torch.nn.Module:
    """Build a norm of MLA's latents, with its own epsilon."""
    return norm(config=config, hidden_size=hidden_size, eps=LATENT_NORM_EPS)


def _dense_mlp_spec(backend: BackendSpecProvider) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    return ModuleSpec(module=MLP, submodules=linears)


def _moe_spec(config: TransformerConfig, backend: BackendSpecProvider) -> Callable[..., MoELayer]:
    spec = get_moe_module_spec_for_backend(
        backend=backend,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    if config.moe_router_topk == 1:
        spec.keywords["submodules"].router = OneExpertRouter
    return partial(ForgetfulMoELayer, **spec.keywords)

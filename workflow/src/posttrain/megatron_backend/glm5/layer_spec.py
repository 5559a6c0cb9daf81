"""Which module stands where in a decoder layer: one spec for Megatron's local modules and for Transformer Engine.

Norms are never fused into the linear behind them: the indexer needs the normalised latent itself, and parameter names
stay the same on every machine.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from posttrain.megatron_backend.glm5.attention import Glm5SelfAttention, SparseCoreAttention
from posttrain.megatron_backend.glm5.norm import LatentRMSNorm, RMSNorm
from posttrain.megatron_backend.glm5.router import OneExpertRouter


def block_spec(config: MLATransformerConfig, use_transformer_engine: bool) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage, dense or MoE by `moe_layer_freq`.

    Args:
        config: Megatron's configuration.
        use_transformer_engine: Linear layers and experts of Transformer Engine (CUDA) instead of Megatron's own.
    """
    backend = TESpecProvider() if use_transformer_engine else LocalSpecProvider()
    first = get_transformer_layer_offset(config)
    stage = range(first, first + get_num_layers_to_build(config))
    layers = [_layer_spec(config, backend, is_moe=bool(config.moe_layer_freq[i])) for i in stage]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: MLATransformerConfig, backend: BackendSpecProvider, is_moe: bool) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe_spec(config, backend) if is_moe else _dense_mlp_spec(backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(backend: BackendSpecProvider) -> ModuleSpec:
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    return ModuleSpec(
        module=Glm5SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=SparseCoreAttention,
            linear_proj=row,
            q_layernorm=LatentRMSNorm,
            kv_layernorm=LatentRMSNorm,
        ),
    )


def _dense_mlp_spec(backend: BackendSpecProvider) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    return ModuleSpec(module=MLP, submodules=linears)


def _moe_spec(config: MLATransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    spec = get_moe_module_spec_for_backend(
        backend=backend,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    if config.moe_router_topk == 1:
        spec.keywords["submodules"].router = OneExpertRouter
    return spec

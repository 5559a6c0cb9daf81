"""Megatron Core's own model of every family that is converted, MTP layers included: what its names are compared with.

The families that the product trains are built as it builds them. The others, with grouped attention, are Megatron's
standard GPT model of its standard layers.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.overrides import TorchFunctionMode

from posttrain.config.schema import Config
from posttrain.rl.megatron_backend.arguments import transformer_config
from posttrain.rl.megatron_backend.glm5.norm import RMSNorm
from posttrain.rl.megatron_backend.layer_spec import block_spec

METADATA = {"non_homogeneous_layers": True}


def build_model(config: Config, with_mtp: bool = True, stacked: bool = False, initialize: bool = False) -> GPTModel:
    """Return this rank's stage of the model.

    Args:
        config: The resolved configuration; its layout is already that of the parallel state.
        with_mtp: Build the MTP layers, too.
        initialize: Draw the weights, as Megatron does by default.
        stacked: All layers alike, as far as Megatron is told: it then stacks their weights in checkpoints.
    """
    arch = config.model.architecture
    settings = transformer_config(config)
    settings.perform_initialization = initialize
    settings.mtp_num_layers = arch.num_nextn_predict_layers or None if with_mtp else None
    if stacked and isinstance(settings.moe_layer_freq, list):
        assert all(settings.moe_layer_freq), "dense and MoE layers are not alike"
        settings.moe_layer_freq = 1
    is_ours = arch.kv_lora_rank or arch.full_attention_interval
    spec = block_spec(settings, False) if is_ours else _standard_layers(settings)
    return GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.partial_rotary_factor or 1.0,
        rotary_base=arch.rope_theta,
        mtp_block_spec=_mtp_layers(settings, spec),
    )


def sharded_tensors(model: GPTModel, stacked: bool = False) -> list[ShardedTensor]:
    """Return every shard of the model as a checkpoint would hold it; factories (fused gate and up) are applied."""
    state = model.sharded_state_dict(metadata=None if stacked else dict(METADATA))
    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


def _standard_layers(settings: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's layers without Transformer Engine, with two of its gaps closed.

    Its torch norm refuses sequence parallelism. And it names the norm before the experts as if a dense MLP followed;
    with Transformer Engine, on GPUs, that norm keeps its name.
    """
    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    frequencies = settings.moe_layer_freq
    layers = []
    for index, layer in enumerate(block.layer_specs, start=get_transformer_layer_offset(settings)):
        layer = copy.deepcopy(layer)
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if settings.qk_layernorm:
            parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
        if settings.num_moe_experts and (frequencies == 1 or frequencies[index]):
            del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _mtp_layers(settings: TransformerConfig, spec: TransformerBlockSubmodules) -> object:
    if not settings.mtp_num_layers:
        return None
    mtp = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False)
    for layer in mtp.layer_specs if mtp else ():
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    return mtp


class OnMeta(TorchFunctionMode):
    """Inside the block, tensors are made without memory, whatever device the code names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, on the meta device where it makes a tensor."""
        kwargs = dict(kwargs or {})
        # On a CPU the product wraps these functions: what arrives here is what it wraps.
        if func in (inspect.unwrap(make) for make in (torch.empty, torch.zeros, torch.ones)):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

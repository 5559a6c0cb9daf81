"""From our configuration to Megatron Core's config dataclasses. The only place that spells Megatron's fields."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from posttrain.config.schema import Config

# transformers builds the two latent norms with its default epsilon, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6
INDEXER_NORM_EPS = 1e-6


def transformer_config(config: Config) -> MLATransformerConfig:
    """Return Megatron's description of the model and of its layout.

    Args:
        config: The resolved configuration.
    """
    settings = MLATransformerConfig(
        **_attention_and_mlp(config),
        **_experts(config),
        **_layout(config),
        **_precision_and_memory(config),
        # the loss is a weighted sum over all tokens of the global batch; nothing is averaged behind it
        calculate_per_token_loss=True,
    )
    _add_indexer(settings, config)
    return settings


def ddp_config(config: Config) -> DistributedDataParallelConfig:
    """Return the settings of Megatron's data-parallel wrapper: gradients in FP32, sharded with the optimizer."""
    on_cuda = config.hardware.device == "cuda"
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=on_cuda,
        overlap_param_gather=False,
        check_for_nan_in_grad=False,  # the step looks at the gradient norm itself and names what it found
    )


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the settings of Megatron's distributed Adam."""
    optimizer, offload = config.optimizer, config.trainer.optimizer_cpu_offload
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=config.trainer.params_dtype == "bf16",
        params_dtype=params_dtype(config),
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload,
        overlap_cpu_optimizer_d2h_h2d=offload,
        use_precision_aware_optimizer=offload,
    )


def params_dtype(config: Config) -> torch.dtype:
    """Return the precision of the weights in the trainer."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.trainer.params_dtype]


def _add_indexer(settings: MLATransformerConfig, config: Config) -> None:
    """Tell the attention about its indexer.

    Megatron's own switch (`experimental_attention_variant="dsa"`) is left off: it selects Megatron's indexer, which
    refuses packed sequences and context parallelism; our layer reads the sizes from the same fields.
    """
    arch = config.model.architecture
    if arch.index_n_heads:
        settings.dsa_indexer_n_heads = arch.index_n_heads
        settings.dsa_indexer_head_dim = arch.index_head_dim
        settings.dsa_indexer_topk = arch.index_topk
    settings.attention_chunk_tokens = config.trainer.attention_chunk_tokens


def _attention_and_mlp(config: Config) -> dict[str, Any]:
    """Return the settings of the parts that every layer has."""
    arch = config.model.architecture
    return {
        "num_layers": arch.num_hidden_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.intermediate_size,
        "num_attention_heads": arch.num_attention_heads,
        "q_lora_rank": arch.q_lora_rank,
        "kv_lora_rank": arch.kv_lora_rank,
        "qk_head_dim": arch.qk_nope_head_dim,
        "qk_pos_emb_head_dim": arch.qk_rope_head_dim,
        "v_head_dim": arch.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": arch.rope_theta,
        "apply_rope_fusion": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _experts(config: Config) -> dict[str, Any]:
    """Return the settings of router, experts and dispatcher."""
    arch, on_cuda = config.model.architecture, config.hardware.device == "cuda"
    num_moe_layers = arch.num_hidden_layers - arch.first_k_dense_replace
    return {
        "num_moe_experts": arch.n_routed_experts,
        "moe_layer_freq": [0] * arch.first_k_dense_replace + [1] * num_moe_layers,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": arch.moe_intermediate_size * arch.n_shared_experts or None,
        "moe_router_topk": arch.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": arch.routed_scaling_factor,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "flex" if config.trainer.deepep else "alltoall",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_grouped_gemm": on_cuda,
        "moe_permute_fusion": on_cuda,
    }


def _layout(config: Config) -> dict[str, Any]:
    """Return which ranks hold what."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage or None,
        "sequence_parallel": parallel.tensor_model_parallel_size > 1,
        "variable_seq_lengths": parallel.pipeline_model_parallel_size > 1,
    }


def _precision_and_memory(config: Config) -> dict[str, Any]:
    """Return number formats, recomputation and fused kernels."""
    trainer, on_cuda = config.trainer, config.hardware.device == "cuda"
    full_recompute = trainer.recompute_granularity == "full"
    return {
        "bf16": trainer.params_dtype == "bf16",
        "params_dtype": params_dtype(config),
        "pipeline_dtype": params_dtype(config),
        "attention_softmax_in_fp32": True,
        "recompute_granularity": "full" if full_recompute else None,
        "recompute_method": trainer.recompute_method if full_recompute else None,
        "recompute_num_layers": trainer.recompute_num_layers if full_recompute else None,
        # weights come from a checkpoint
        "use_cpu_initialization": not on_cuda,
        "perform_initialization": False,
        # fused kernels are CUDA kernels
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }

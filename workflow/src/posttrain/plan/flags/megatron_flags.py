"""Megatron Core's fields, spelled as version 0.19.2 names them.

`MLATransformerConfig`, `DistributedDataParallelConfig` and `OptimizerConfig` are built from these tables. Values are
plain data: a precision is "bf16" or "fp32", an activation is its name; `rl.megatron_backend.arguments` turns them into
torch's objects.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.config.derived import min_lr
from posttrain.config.families import FAMILIES, family_of, is_delta_net
from posttrain.config.schema import Config
from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import Flag, flag
from posttrain.plan.flags.indexer_kernel import KEY as INDEXER
from posttrain.plan.flags.indexer_kernel import indexer_kernel
from posttrain.plan.flags.sparse_kernels import KEY as KERNEL
from posttrain.plan.flags.sparse_kernels import sparse_kernel

ARCHITECTURE, FAMILY = "model.architecture", "the model family"

_OVERLAP_PARAM_GATHER = flag(
    "overlap_param_gather", True, reason="new weights arrive while the next update's forward pass runs"
)
_CONTEXT_EXCHANGE = flag(
    "cp_comm_type", "all_gather", "parallel.context_parallel_size", reason="as our own attention does it"
)


def megatron_flags(config: Config) -> dict[str, list[Flag]]:
    """Return reader -> flags: `megatron.model`, `megatron.ddp`, `megatron.optimizer` and `trainer.env`."""
    return {
        "megatron.model": [*model_flags(config), *indexer_flags(config)],
        "megatron.ddp": ddp_flags(config),
        "megatron.optimizer": optimizer_flags(config),
        "trainer.env": trainer_environment(config),
    }


def model_flags(config: Config) -> list[Flag]:
    """Return the arguments of `MLATransformerConfig`."""
    return [
        *_attention_and_mlp(config),
        *_experts(config),
        *_layout(config),
        *_precision_and_memory(config),
        *_kernels(config),
        flag(
            "calculate_per_token_loss",
            True,
            reason="the loss is a weighted sum over all tokens of the global batch; nothing is averaged behind it",
        ),
    ]


def indexer_flags(config: Config) -> list[Flag]:
    """Return the indexer's settings, which are set after Megatron's configuration is built.

    Megatron's own switch (`experimental_attention_variant="dsa"`) is left off: it selects Megatron's indexer (why ours
    stays: docs/decisions/028); our layer reads the sizes from the same fields. `attention_chunk_tokens`,
    `sparse_attention`, `indexer_kernel` and `keep_index_choice` are ours alone.
    """
    arch, kernel, indexer = config.model.architecture, sparse_kernel(config), indexer_kernel(config)
    sizes = []
    if arch.index_n_heads:
        sizes = [
            flag("dsa_indexer_n_heads", arch.index_n_heads, f"{ARCHITECTURE}.index_n_heads"),
            flag("dsa_indexer_head_dim", arch.index_head_dim, f"{ARCHITECTURE}.index_head_dim"),
            flag("dsa_indexer_topk", arch.index_topk, f"{ARCHITECTURE}.index_topk"),
            flag("dsa_indexer_topk_freq", arch.index_topk_freq, f"{ARCHITECTURE}.index_topk_freq"),
            flag(
                "dsa_indexer_skip_topk_offset",
                arch.index_skip_topk_offset,
                f"{ARCHITECTURE}.index_skip_topk_offset",
            ),
            flag(
                "dsa_indexer_rope_interleaved",
                family_of(arch).indexer_interleaved,
                f"{ARCHITECTURE}.model_type",
            ),
            flag("sparse_attention", kernel.name, KERNEL, reason=kernel.reason),
            flag("indexer_kernel", indexer.name, INDEXER, reason=indexer.reason),
            _key(config, "keep_index_choice", "trainer.keep_index_choice"),
        ]
    return [*sizes, _key(config, "attention_chunk_tokens", "trainer.attention_chunk_tokens")]


def ddp_flags(config: Config) -> list[Flag]:
    """Return the arguments of `DistributedDataParallelConfig`: gradients in FP32, sharded with the optimizer."""
    return [
        flag("grad_reduce_in_fp32", True, reason="the recipe: gradients are accumulated and reduced in FP32"),
        flag("use_distributed_optimizer", True, reason="each rank keeps its share of the optimizer's state"),
        flag("overlap_grad_reduce", True, reason="gradients travel while others are computed, over gloo too"),
        _OVERLAP_PARAM_GATHER,
        flag(
            "check_for_nan_in_grad",
            False,
            reason="the step looks at the gradient norm itself and names what it found",
        ),
    ]


def optimizer_flags(config: Config) -> list[Flag]:
    """Return the arguments of `OptimizerConfig`: Megatron's distributed Adam."""
    offload, offload_key = config.trainer.optimizer_cpu_offload, "trainer.optimizer_cpu_offload"
    return [
        flag("optimizer", "adam", reason="the only one"),
        _key(config, "lr", "optimizer.lr"),
        flag("min_lr", min_lr(config), "optimizer.lr", "optimizer.lr_schedule", "optimizer.lr_floor"),
        _key(config, "weight_decay", "optimizer.weight_decay"),
        _key(config, "adam_beta1", "optimizer.beta1"),
        _key(config, "adam_beta2", "optimizer.beta2"),
        _key(config, "adam_eps", "optimizer.eps"),
        _key(config, "clip_grad", "optimizer.clip_grad"),
        flag("bf16", config.trainer.params_dtype == "bf16", "trainer.params_dtype"),
        _key(config, "params_dtype", "trainer.params_dtype"),
        flag("use_distributed_optimizer", True, reason="as in megatron.ddp"),
        _OVERLAP_PARAM_GATHER,
        flag("optimizer_cpu_offload", offload, offload_key),
        flag(
            "optimizer_offload_fraction",
            float(offload),
            offload_key,
            reason="all of it; Megatron's own default is none",
        ),
        flag("overlap_cpu_optimizer_d2h_h2d", offload, offload_key, reason="the recipe, with offload"),
        flag("use_precision_aware_optimizer", offload, offload_key, reason="the recipe, with offload"),
    ]


def _attention_and_mlp(config: Config) -> list[Flag]:
    """Return the settings of the parts that every layer has."""
    sizes = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "layernorm_epsilon": "rms_norm_eps",
    }
    return [
        *_same(config, sizes),
        *(_latent_attention(config) if config.model.architecture.kv_lora_rank else _grouped_attention(config)),
        *(_delta_nets(config) if config.model.architecture.full_attention_interval else []),
        flag("normalization", "RMSNorm", reason=FAMILY),
        *_zero_centered_norms(config),
        flag("gated_linear_unit", True, reason=FAMILY),
        flag("activation_func", "silu", reason=FAMILY),
        flag("add_bias_linear", False, reason=FAMILY),
        flag("hidden_dropout", 0.0, reason="the recipe; engines drop nothing either"),
        flag("attention_dropout", 0.0, reason="the recipe; engines drop nothing either"),
    ]


def _latent_attention(config: Config) -> list[Flag]:
    """Return the settings of MLA."""
    sizes = {
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "rotary_base": "rope_theta",
    }
    return [
        flag("q_lora_rank", config.model.architecture.q_lora_rank or None, f"{ARCHITECTURE}.q_lora_rank"),
        *_same(config, sizes),
        flag("qk_layernorm", True, reason=FAMILY),
        *_positions(config),
        flag("apply_rope_fusion", False, reason="Megatron's fused kernel knows no interleaved pairs"),
    ]


def _positions(config: Config) -> list[Flag]:
    """Return how rotary positions are scaled (MLA)."""
    scaling, key = config.model.architecture.rope_scaling, f"{ARCHITECTURE}.rope_scaling"
    if scaling.factor == 1:
        return [flag("rope_type", "rope", f"{key}.factor")]
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return [
        flag("rope_type", "yarn", f"{key}.factor"),
        _key(config, "rotary_scaling_factor", f"{key}.factor"),
        *(_key(config, name, f"{key}.{name}") for name in names),
    ]


def _grouped_attention(config: Config) -> list[Flag]:
    """Return the settings of GQA."""
    arch = config.model.architecture
    family = family_of(arch)
    is_normed = arch.use_qk_norm or family.always_qk_norm
    gate = [flag("attention_output_gate", True, f"{ARCHITECTURE}.model_type")] if family.gated_attention else []
    return [
        *gate,
        *_same(config, {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}),
        flag("apply_rope_fusion", _on_cuda(config), "hardware.device", reason="a CUDA kernel"),
        flag("add_qkv_bias", arch.attention_bias, f"{ARCHITECTURE}.attention_bias"),
        flag("qk_layernorm", is_normed, f"{ARCHITECTURE}.use_qk_norm", f"{ARCHITECTURE}.model_type"),
    ]


def _delta_nets(config: Config) -> list[Flag]:
    """Return the settings of gated delta nets.

    Megatron's own switch (`experimental_attention_variant="gated_delta_net"`) is left off: its layer needs fla to be
    built at all. Ours reads the sizes from the same fields.
    """
    arch, names = config.model.architecture, ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    kinds = [int(is_delta_net(arch, layer)) for layer in range(arch.num_hidden_layers)]
    return [
        flag("linear_attention_freq", kinds, f"{ARCHITECTURE}.full_attention_interval"),
        *_same(config, {name: name for name in (*(f"linear_{name}" for name in names), "linear_conv_kernel_dim")}),
    ]


def _zero_centered_norms(config: Config) -> list[Flag]:
    """Return whether the weight of a norm is its distance from 1."""
    if not family_of(config.model.architecture).zero_centered_norms:
        return []
    return [flag("layernorm_zero_centered_gamma", True, f"{ARCHITECTURE}.model_type")]


def _experts(config: Config) -> list[Flag]:
    """Return the settings of experts and dispatcher; none for a dense model."""
    arch = config.model.architecture
    if not arch.n_routed_experts:
        reason = "looked at without experts, too: Megatron's default refuses rows of varying length"
        return [flag("moe_token_dispatcher_type", "alltoall", reason=reason)]
    dense, layers = f"{ARCHITECTURE}.first_k_dense_replace", f"{ARCHITECTURE}.num_hidden_layers"
    num_moe_layers = arch.num_hidden_layers - arch.first_k_dense_replace
    parallel = config.parallel
    has_peers = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size > 1
    dispatcher = "flex" if config.trainer.deepep and has_peers else "alltoall"
    key = "algorithm.routing_replay"
    replay = [flag("moe_enable_routing_replay", True, key)] if config.algorithm.routing_replay else []
    return [
        *replay,
        *_same(config, {"num_moe_experts": "n_routed_experts", "moe_ffn_hidden_size": "moe_intermediate_size"}),
        flag("moe_layer_freq", [0] * arch.first_k_dense_replace + [1] * num_moe_layers, dense, layers),
        *_shared_experts(config),
        *_router(config),
        flag(
            "moe_token_dispatcher_type",
            dispatcher,
            "trainer.deepep",
            "parallel.expert_model_parallel_size",
            "parallel.expert_tensor_parallel_size",
            reason="`flex` refuses experts that one rank holds alone",
        ),
        flag("moe_flex_dispatcher_backend", "deepep", reason="the dispatcher `flex` uses; without it no effect"),
        flag("moe_grouped_gemm", _on_cuda(config), "hardware.device", reason="CUDA kernels"),
        flag("moe_permute_fusion", _on_cuda(config), "hardware.device", reason="CUDA kernels"),
    ]


def _shared_experts(config: Config) -> list[Flag]:
    """Return the width of the experts that every token sees, and whether a gate scales their output."""
    arch, name = config.model.architecture, "moe_shared_expert_intermediate_size"
    if arch.shared_expert_intermediate_size:
        key = f"{ARCHITECTURE}.shared_expert_intermediate_size"
        return [_key(config, name, key), flag("moe_shared_expert_gate", True, f"{ARCHITECTURE}.model_type")]
    shared, width = f"{ARCHITECTURE}.n_shared_experts", f"{ARCHITECTURE}.moe_intermediate_size"
    return [flag(name, arch.moe_intermediate_size * arch.n_shared_experts or None, width, shared)]


def _router(config: Config) -> list[Flag]:
    has_bias = FAMILIES[config.model.architecture.model_type].router_bias
    coefficient = config.optimizer.moe_aux_loss_coeff
    scaling = {"moe_router_topk_scaling_factor": "routed_scaling_factor"} if has_bias else {}
    return [
        *_same(config, {"moe_router_topk": "num_experts_per_tok"} | scaling),
        *_groups(config),
        flag("moe_router_score_function", "sigmoid" if has_bias else "softmax", f"{ARCHITECTURE}.model_type"),
        flag("moe_router_enable_expert_bias", has_bias, f"{ARCHITECTURE}.model_type"),
        _key(config, "moe_router_bias_update_rate", "optimizer.router_bias_update_rate"),
        flag("moe_router_load_balancing_type", "aux_loss" if coefficient else "none", "optimizer.moe_aux_loss_coeff"),
        _key(config, "moe_aux_loss_coeff", "optimizer.moe_aux_loss_coeff"),
        flag("moe_router_dtype", "fp32", reason="the recipe: close scores decide which experts a token sees"),
    ]


def _groups(config: Config) -> list[Flag]:
    """Return the groups of experts of which a token chooses some first."""
    if config.model.architecture.n_group == 1:
        return []
    return _same(config, {"moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group"})


def _layout(config: Config) -> list[Flag]:
    """Return which ranks hold what."""
    parallel = config.parallel
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    tensor, pipeline = f"parallel.{names[0]}", f"parallel.{names[1]}"
    return [
        *(_key(config, name, f"parallel.{name}") for name in names),
        *([_CONTEXT_EXCHANGE] if parallel.context_parallel_size > 1 else []),
        *(
            flag(name, getattr(parallel, name) or None, f"parallel.{name}")
            for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        ),
        *_interleaving(config),
        flag("sequence_parallel", parallel.tensor_model_parallel_size > 1, tensor, reason="the recipe, with TP"),
        flag(
            "variable_seq_lengths",
            parallel.pipeline_model_parallel_size > 1,
            pipeline,
            reason="packed rows differ in length from micro-batch to micro-batch",
        ),
    ]


def _interleaving(config: Config) -> list[Flag]:
    """Return what Megatron's own training sets where stages have several chunks."""
    name = "virtual_pipeline_model_parallel_size"
    if getattr(config.parallel, name) == 1:
        return []
    overlap = flag("overlap_p2p_comm", True, f"parallel.{name}", reason="two stages send each other both ways at once")
    return [_key(config, name, f"parallel.{name}"), overlap, flag("batch_p2p_comm", False, reason="overlap_p2p_comm")]


def _precision_and_memory(config: Config) -> list[Flag]:
    """Return number formats and recomputation."""
    trainer, dtype = config.trainer, "trainer.params_dtype"
    return [
        flag("bf16", trainer.params_dtype == "bf16", dtype),
        flag("params_dtype", trainer.params_dtype, dtype),
        flag("pipeline_dtype", trainer.params_dtype, dtype),
        flag("attention_softmax_in_fp32", True, reason="the recipe"),
        *_recomputation(config),
        flag("use_cpu_initialization", not _on_cuda(config), "hardware.device", reason="where weights are allocated"),
        flag("perform_initialization", False, reason="weights come from a checkpoint"),
    ]


def _recomputation(config: Config) -> list[Flag]:
    """Return which layers, or modules of every layer, are computed again in the backward pass."""
    trainer, key = config.trainer, "trainer.recompute_granularity"
    granularity = trainer.recompute_granularity
    is_full = granularity == "full"
    modules = [_key(config, "recompute_modules", "trainer.recompute_modules")] if granularity == "selective" else []
    method, layers = ("trainer.recompute_method", "trainer.recompute_num_layers")
    return [
        flag("recompute_granularity", None if granularity == "none" else granularity, key),
        *modules,
        flag("recompute_method", trainer.recompute_method if is_full else None, key, method),
        flag("recompute_num_layers", trainer.recompute_num_layers if is_full else None, key, layers),
    ]


def _kernels(config: Config) -> list[Flag]:
    """Return the fused kernels."""
    fused = "fused kernels are CUDA kernels"
    return [
        flag("bias_activation_fusion", _on_cuda(config), "hardware.device", reason=fused),
        flag("bias_dropout_fusion", _on_cuda(config), "hardware.device", reason=fused),
        flag("masked_softmax_fusion", False, reason="the attention is ours"),
        flag("persist_layer_norm", False, reason="a LayerNorm kernel; the model has RMSNorm"),
        flag("cross_entropy_loss_fusion", False, reason="log-probabilities are ours, in chunks of tokens"),
        flag(
            "gradient_accumulation_fusion",
            False,
            reason="Apex's kernel, for an output layer that is ours; Transformer Engine's layers fuse it",
        ),
    ]


def _same(config: Config, fields: Mapping[str, str]) -> list[Flag]:
    """Return flags whose values are the architecture's: Megatron's name -> ours."""
    return [_key(config, name, f"{ARCHITECTURE}.{field}") for name, field in fields.items()]


def _key(config: Config, name: str, key: str) -> Flag:
    """Return a flag whose value is a key's, unchanged."""
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return flag(name, value, key)


def _on_cuda(config: Config) -> bool:
    return config.hardware.device == "cuda"

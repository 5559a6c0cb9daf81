"""The trainer's flags of slime and miles; most are Megatron-LM's."""

from __future__ import annotations

from posttrain.foreign import conversions as to
from posttrain.foreign.row import row

_MODEL = "model.architecture"
_SIZES = (
    ("--num-layers 78", "num_hidden_layers", "num_layers"),
    ("--hidden-size 6144", "hidden_size", "hidden_size"),
    ("--ffn-hidden-size 12288", "intermediate_size", "ffn_hidden_size"),
    ("--num-attention-heads 64", "num_attention_heads", "num_attention_heads"),
    ("--num-query-groups", "num_key_value_heads", "num_query_groups"),
    ("--num-experts 256", "n_routed_experts", "num_moe_experts"),
    ("--moe-ffn-hidden-size 2048", "moe_intermediate_size", "moe_ffn_hidden_size"),
    ("--moe-router-topk 8", "num_experts_per_tok", "moe_router_topk"),
    ("--moe-router-topk-scaling-factor 2.5", "routed_scaling_factor", "moe_router_topk_scaling_factor"),
    ("--moe-router-num-groups", "n_group", "moe_router_num_groups"),
    ("--moe-router-group-topk", "topk_group", "moe_router_group_topk"),
    ("--q-lora-rank 2048", "q_lora_rank", "q_lora_rank"),
    ("--kv-lora-rank 512", "kv_lora_rank", "kv_lora_rank"),
    ("--qk-head-dim 192", "qk_nope_head_dim", "qk_head_dim"),
    ("--qk-pos-emb-head-dim 64", "qk_rope_head_dim", "qk_pos_emb_head_dim"),
    ("--v-head-dim 256", "v_head_dim", "v_head_dim"),
    ("--norm-epsilon 1e-5", "rms_norm_eps", "layernorm_epsilon"),
    ("--rotary-base 1000000", "rope_theta", "-"),
    ("--vocab-size 154880", "vocab_size", "-"),
)
_FLAGS, _FIELDS, _SETTINGS = zip(*_SIZES, strict=True)
LAYOUT = (
    *(row(f"--{name.replace('_', '-')} {size}", f"parallel.{name}", name, absent="1") for name, size in (
        ("tensor_model_parallel_size", 4), ("pipeline_model_parallel_size", 4), ("context_parallel_size", 2),
        ("expert_model_parallel_size", 32), ("expert_tensor_parallel_size", 1))),
    row("--decoder-last-pipeline-num-layers 18", "parallel.num_layers_in_last_pipeline_stage",
        "num_layers_in_last_pipeline_stage", absent="0"),
    row("--sequence-parallel", "", "sequence_parallel", "on with TP: follows from `parallel`"),
    row("--allgather-cp", "parallel.context_parallel_size", "", "with more than one rank",
        told="`cp_comm_type all_gather`", convert=to.follows),
    row("--recompute-granularity full", "trainer.recompute_granularity", "recompute_granularity",
        convert=to.recompute, absent="none"),
    row("--recompute-method uniform --recompute-num-layers 1", "trainer.recompute_method trainer.recompute_num_layers",
        "recompute_method recompute_num_layers"),
    row("--max-tokens-per-gpu 16384", "trainer.max_tokens_per_gpu", "", "our batching"),
    row("--use-dynamic-batch-size", note="always", absent=""),
    row("--micro-batch-size --log-probs-max-tokens-per-gpu", "trainer.max_tokens_per_gpu", "",
        "a micro-batch has a budget of tokens, not of samples, and the same in all passes",
        not_here="the budget is in tokens, the same for all passes"),
    row("--balance-data --balance-by-flops", note="rows are packed by length, and spread evenly over ranks"),
    row("--data-pad-size-multiplier 4096",
        note="left out, because packed rows are padded to what the layout divides and no further"),
    row("--log-probs-chunk-size 1024", "trainer.log_probs_chunk_size", "", "our log-probabilities"),
    row("--moe-token-dispatcher-type flex --moe-enable-deepep", "trainer.deepep", "moe_token_dispatcher_type",
        "or `alltoall`; the second is deprecated, for `moe_flex_dispatcher_backend`",
        convert=to.dispatcher, late=True),
)  # fmt: skip
MODEL = (
    row(" ".join(_FLAGS), " ".join(f"{_MODEL}.{name}" for name in _FIELDS), " ".join(_SETTINGS),
        "the model's file says them; `--rotary-base` and `--vocab-size` are arguments of the model around the layers"),
    row("--moe-layer-freq [0]*3+[1]*75 --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-dtype fp32", "",
        "moe_layer_freq moe_shared_expert_intermediate_size moe_router_score_function moe_router_enable_expert_bias "
        "moe_router_dtype", "follow from the model"),
    row("--moe-router-bias-update-rate 0", "optimizer.router_bias_update_rate", "moe_router_bias_update_rate"),
    row("--moe-aux-loss-coeff 0", "optimizer.moe_aux_loss_coeff", "moe_aux_loss_coeff"),
    row("--moe-router-load-balancing-type seq_aux_loss", note="`none` without a coefficient, else `aux_loss`",
        told="`moe_router_load_balancing_type`", convert=to.balancing),
    row("--moe-router-pre-softmax --moe-router-fusion", note="left out, because a sigmoid router has no softmax, and "
        "Megatron's other order gives Qwen3's weights, too"),
    row("--moe-grouped-gemm --moe-permute-fusion", "", "moe_grouped_gemm moe_permute_fusion", "on GPUs"),
    row("--multi-latent-attention --group-query-attention --use-rotary-position-embeddings --add-qkv-bias",
        note="left out, because the model's family says it"),
    row("--untie-embeddings-and-output-weights", f"{_MODEL}.tie_word_embeddings", "", "an argument of the model",
        convert=to.always(model__architecture__tie_word_embeddings=False)),
    row("--position-embedding-type rope --no-position-embedding --rotary-percent", note="arguments of the model"),
    row("--kv-channels 192", f"{_MODEL}.head_dim", "", "`kv_channels`; left out with MLA, which derives it",
        convert=to.head_width),
    row("--qk-layernorm --swiglu --normalization RMSNorm", "", "qk_layernorm gated_linear_unit normalization",
        "constant"),
    row("--disable-bias-linear", "", "add_bias_linear", "constant", renamed={True: False}),
    row("--make-vocab-size-divisible-by 16",
        note="left out, because the vocabulary is not padded: a rule asks that TP divides it"),
    row("--attention-dropout 0 --hidden-dropout 0", "", "attention_dropout hidden_dropout", "constant", absent="0.1"),
    row("--accumulate-allreduce-grads-in-fp32", "", "grad_reduce_in_fp32", "constant"),
    row("--attention-softmax-in-fp32", "", "attention_softmax_in_fp32", "constant"),
    row("--attention-backend flash", note="left out, because the attention is ours"),
    row("--spec get_glm5_spec --enable-experimental", note="left out, because the layer is built by our code"),
)  # fmt: skip
OPTIMIZER = (
    row("--optimizer adam", "", "optimizer", "constant"),
    row("--lr 1e-6", "optimizer.lr", "lr", absent="1e-6"),
    row("--lr-decay-style constant", "optimizer.lr_schedule", "", "`WSD` is `wsd`", told="our learning rate",
        convert=to.schedule, absent="linear"),
    row("--lr-warmup-iters", "optimizer.lr_warmup_steps", "", "theirs counts updates, ours steps", convert=to.warmup),
    row("--lr-warmup-fraction", "optimizer.lr_warmup_share"),
    row("--min-lr", "optimizer.lr_floor", "", "ours is a share of `optimizer.lr`", convert=to.lr_floor),
    row("--weight-decay 0.1", "optimizer.weight_decay", "weight_decay", absent="0.01"),
    row("--adam-beta1 0.9", "optimizer.beta1", "adam_beta1", absent="0.9"),
    row("--adam-beta2 0.98", "optimizer.beta2", "adam_beta2", absent="0.999"),
    row("--adam-eps", "optimizer.eps", "adam_eps", absent="1e-8"),
    row("--clip-grad", "optimizer.clip_grad", "clip_grad", absent="1.0"),
    row("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer",
        "trainer.optimizer_cpu_offload",
        "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer", absent="false"),
    row("--rematerialize-param-from-master-weight",
        note="left out, because nothing keeps a second copy of the weights"),
    row("CUDA_DEVICE_MAX_CONNECTIONS=1", "", "CUDA_DEVICE_MAX_CONNECTIONS", "constant, with TP"),
    row("NCCL_NVLS_ENABLE", note="left out, because NCCL finds it out by itself"),
    row("MASTER_ADDR no_proxy PYTHONPATH NCCL_* GLOO_SOCKET_IFNAME",
        note="left out, because ranks get their address from the launcher and inherit the rest"),
)  # fmt: skip
TRAINER = (*LAYOUT, *MODEL, *OPTIMIZER)

"""Flags and environment of the engines: SGLang's as version 0.5.23 parses them, and the embedded engine's own.

`docs/coming-from.md` maps the recipe's spellings to these. The role of an engine is "unified" (prefills and decodes),
or with prefill-decode disaggregation "prefill" or "decode", each with its own world size and batch.

Flags of a particular GPU are in its file in `config/hardware`, under `hardware.kernels`.

Sources: the recipe's settings, `miles-glm5-recipe.txt`, section 5.3; few requests and AMD, `sglang-glm5-cookbook.txt`,
section 3.2; SGLang 0.5.23 `srt/server_args.py`, `srt/environ.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from posttrain.config.derived import rollout_samples_per_step, takes_turns
from posttrain.config.engine_rules import DEEPEP_MAX_TOKENS
from posttrain.config.formats import FP8_BLOCK
from posttrain.config.schema import Config
from posttrain.plan.flags.delta_nets import delta_net_environment
from posttrain.plan.flags.environment import (
    hardware_environment,
    network_flags,
    site_environment,
    thread_and_memory_environment,
)
from posttrain.plan.flags.flag import Flag, flag

UNIFIED, PREFILL, DECODE = "unified", "prefill", "decode"
RECIPE = "the recipe"
# KV cache tokens of an engine on a CPU, and its share of host memory: enough for small models next to a trainer.
CPU_MAX_TOTAL_TOKENS = 32768
CPU_MEM_FRACTION = 0.1
# The published recipe's values: prefill tokens per GPU and step, and tokens per page of the sparse attention's kernels.
CHUNKED_PREFILL_TOKENS_PER_RANK = 2048
KV_PAGE_TOKENS = 64
WATCHDOG_SECONDS = 3600
SPARSE_KERNEL = "flashmla_sparse"
# The recipe's largest decode graph and DeepEP buffer per rank: (unified, separate prefill).
GRAPH_BATCH_SIZE = {UNIFIED: 256, DECODE: 8, PREFILL: 8}
DEEPEP_TOKENS = {UNIFIED: 256, DECODE: 32, PREFILL: 32}
ROLE_KEY = "engine.pd.num_prefill_engines"


def engine_flags(config: Config) -> dict[str, list[Flag]]:
    """Return reader -> flags of every kind of engine in a run: its command line and its environment.

    Flags that are known only at the start of a process (addresses, its index among nodes) are excluded.
    """
    if config.engine.kind == "embedded":
        return {"embedded": embedded_flags(config, deterministic=True), "embedded.env": environment_flags(config)}
    readers = {}
    for role in roles(config):
        name = "sglang" if role == UNIFIED else f"sglang.{role}"
        readers[name] = sglang_flags(config, role)
        readers[f"{name}.env"] = environment_flags(config, role)
    return readers


def roles(config: Config) -> tuple[str, ...]:
    """Return the roles of a run's engines."""
    return (PREFILL, DECODE) if config.engine.pd.num_prefill_engines else (UNIFIED,)


def world_size(config: Config, role: str = UNIFIED) -> int:
    """Return the GPUs of one engine."""
    return config.engine.pd.gpus_per_prefill_engine if role == PREFILL else config.engine.gpus_per_engine


def nodes_per_engine(config: Config, role: str = UNIFIED) -> int:
    """Return how many nodes one engine spans."""
    return -(-world_size(config, role) // config.hardware.gpus_per_node)


def is_mixture(config: Config) -> bool:
    """Return whether the model has experts."""
    arch = config.model.architecture
    return arch.n_routed_experts > 0 and arch.first_k_dense_replace < arch.num_hidden_layers


def has_dp_attention(config: Config) -> bool:
    """Return whether each GPU of an engine computes attention for its own requests."""
    return config.hardware.device == "cuda" and config.engine.dp_attention and is_mixture(config)


def has_deepep(config: Config, role: str = UNIFIED) -> bool:
    """Return whether tokens are sent to experts through DeepEP, as in the recipe with FP8 weights."""
    is_allowed = config.engine.deepep and config.hardware.deepep
    return is_allowed and has_dp_attention(config) and config.rollout.fp8 and world_size(config, role) > 1


def expert_parallel_size(config: Config, role: str = UNIFIED) -> int:
    """Return the number of GPUs over which whole experts are distributed; 1 splits each expert over all GPUs instead.

    The recipe distributes them. With few requests that leaves most GPUs idle, so experts are split, as in the cookbook,
    if FP8 blocks allow it.
    """
    ranks, width = world_size(config, role), config.model.architecture.moe_intermediate_size
    block = FP8_BLOCK if config.rollout.fp8 else 1
    return 1 if not has_dp_attention(config) and width % (block * ranks) == 0 else ranks


def graph_batch_size(config: Config, role: str = UNIFIED) -> int:
    """Return the largest decode batch per rank that is captured as a CUDA graph, within DeepEP's limit.

    The default is the recipe's. Its value for a decode engine is for small steps, and larger batches would decode
    without graphs, so a decode engine uses at least the requests that a step gives a rank.
    """
    most = DEEPEP_MAX_TOKENS // (config.engine.mtp_steps + 1)
    wanted = GRAPH_BATCH_SIZE[role]
    if role == DECODE:
        wanted = max(wanted, _requests_of_a_rank(config))
    return config.engine.graph_batch_size or min(wanted, most)


def _requests_of_a_rank(config: Config) -> int:
    """Return the largest number of a step's requests in one batch of a rank of a decode engine."""
    of_engine = math.ceil(rollout_samples_per_step(config) / config.engine.num_engines)
    at_a_time = min(of_engine, config.engine.max_running_requests)
    return math.ceil(at_a_time / config.engine.gpus_per_engine) if has_dp_attention(config) else at_a_time


def deepep_tokens(config: Config, role: str = UNIFIED) -> int:
    """Return the tokens per rank in DeepEP's buffers: the recipe's, or those of the largest graph.

    With EAGLE each request of a decode batch sends its drafted tokens and one more.
    """
    return max(DEEPEP_TOKENS[role], graph_batch_size(config, role) * (config.engine.mtp_steps + 1))


def embedded_flags(config: Config, deterministic: bool) -> list[Flag]:
    """Return the command line of the embedded engine."""
    switch = "--deterministic" if deterministic else "--no-deterministic"
    return [
        flag("--dtype", config.engine.dtype, "engine.dtype"),
        flag("--served-threads", config.engine.num_threads, "engine.num_threads"),
        flag("--max-running-requests", config.engine.max_running_requests, "engine.max_running_requests"),
        flag(switch, True, reason="in training a request must not depend on its neighbours"),
    ]


def sglang_flags(config: Config, role: str = UNIFIED, engine_index: int = 0) -> list[Flag]:
    """Return the command line of an SGLang server.

    Args:
        config: The resolved configuration.
        role: "unified", "prefill" or "decode".
        engine_index: Index of the engine in the run.
    """
    engine = config.engine
    running, key = engine.max_running_requests, "engine.max_running_requests"
    if role == PREFILL:
        running, key = engine.pd.max_running_requests, "engine.pd.max_running_requests"
    replay = "algorithm.routing_replay"
    common = [
        *([flag("--enable-return-routed-experts", True, replay)] if config.algorithm.routing_replay else []),
        flag("--served-model-name", config.model.name, "model.name"),
        flag("--dtype", engine.dtype, "engine.dtype"),
        flag("--max-running-requests", running, key),
        flag(
            "--random-seed",
            config.training.seed + engine_index,
            "training.seed",
            reason="plus the engine's number: responses without a seed of their own must not repeat another engine's",
        ),
    ]
    return common + (cpu_flags(config, role) if config.hardware.device == "cpu" else _on_gpus(config, role))


def environment_flags(config: Config, role: str = UNIFIED) -> list[Flag]:
    """Return the variables of an engine's environment."""
    flags = [
        *thread_and_memory_environment(config),
        flag("HF_HUB_OFFLINE", 1, reason="an engine's model is a folder; it needs nothing from the network"),
        flag("TOKENIZERS_PARALLELISM", "false", reason="its threads do not survive a fork"),
    ]
    if config.engine.num_threads:
        flags.append(flag("OMP_NUM_THREADS", config.engine.num_threads, "engine.num_threads"))
    if config.engine.kind == "sglang":
        flags += delta_net_environment(config)
        # Trainer ranks on other nodes also send weights over gloo.
        flags += network_flags(config, config.nodes)
        flags += hardware_environment(config, role == UNIFIED and nodes_per_engine(config) == 1)
    flags += site_environment(config, "engine_environment")
    if config.engine.kind == "embedded":
        return flags
    return flags + (_cpu_environment(role) if config.hardware.device == "cpu" else _gpu_environment(config, role))


def cpu_flags(config: Config, role: str) -> list[Flag]:
    """Return SGLang's flags for a CPU."""
    given = "SGLang on a CPU; envs/sglang-cpu/README.md"
    return [
        flag("--device", "cpu", "hardware.device"),
        flag("--attention-backend", "torch_native", reason=given),
        flag("--sampling-backend", "pytorch", reason=given),
        flag("--cuda-graph-backend-decode", "disabled", reason=given),
        flag("--cuda-graph-backend-prefill", "disabled", reason=given),
        flag("--mem-fraction-static", CPU_MEM_FRACTION, reason="of host memory, beside a trainer"),
        flag("--max-total-tokens", CPU_MAX_TOTAL_TOKENS, reason="enough for small models"),
        flag("--sleep-on-idle", True, reason="an idle scheduler would otherwise occupy a core"),
        flag("--enable-deterministic-inference", True, reason="without it `sampling_seed` has no effect"),
        flag("--disable-radix-cache", True, reason="a cached prefix is summed in another order"),
        *([flag("--tp-size", ranks, _world_size_key(role))] if (ranks := world_size(config, role)) > 1 else []),
        *node_count(config, role),
        *disaggregation(config, role),
        *_retraction(config, role),
    ]


def _on_gpus(config: Config, role: str) -> list[Flag]:
    seconds = config.hardware.kernels.watchdog_seconds or WATCHDOG_SECONDS
    flags = [
        flag("--mem-fraction-static", config.engine.mem_fraction_static, "engine.mem_fraction_static"),
        flag("--kv-cache-dtype", "bf16", reason=f"{RECIPE}: attention as the trainer computes it"),
        flag("--watchdog-timeout", seconds, "hardware.kernels.watchdog_seconds", reason="loading takes long"),
    ]
    parts: tuple[Callable[[Config, str], list[Flag]], ...] = (
        parallelism,
        _batches,
        kv_page,
        attention_kernels,
        _expert_kernels,
        speculation,
        disaggregation,
        _retraction,
        node_count,
        _determinism,
        _sleep,
    )
    return flags + [item for part in parts for item in part(config, role)]


def _sleep(config: Config, role: str) -> list[Flag]:
    if not takes_turns(config):
        return []
    flags = [
        flag("--enable-memory-saver", True, "engine.sleep", reason="a sleeping engine gives back its weights and cache")
    ]
    if config.engine.mtp_steps:
        drafts = "what drafts is not trained: no update brings it again"
        flags.append(flag("--enable-draft-weights-cpu-backup", True, "engine.mtp_steps", "engine.sleep", reason=drafts))
    return flags


def parallelism(config: Config, role: str) -> list[Flag]:
    """Return the flags of an engine's parallelism."""
    key = _world_size_key(role)
    ranks = world_size(config, role)
    flags = [flag("--tp-size", ranks, key)]
    if is_mixture(config):
        reason = f"{RECIPE}: experts over all GPUs; the cookbook cuts them where requests are few"
        flags.append(flag("--ep-size", expert_parallel_size(config, role), key, "engine.dp_attention", reason=reason))
    if has_dp_attention(config):
        flags += [
            flag("--attn-dp-size", ranks, key, "engine.dp_attention"),
            flag("--moe-dense-tp-size", 1, "engine.dp_attention", reason=f"{RECIPE}: each GPU has the dense layers"),
            flag("--enable-dp-lm-head", True, "engine.dp_attention", reason=f"{RECIPE}: no gather before the logits"),
        ]
    return flags


def _batches(config: Config, role: str) -> list[Flag]:
    total = config.hardware.kernels.chunked_prefill_tokens
    # SGLang divides the chunk by the data-parallel ranks.
    ranks = world_size(config, role)
    chunk = total or CHUNKED_PREFILL_TOKENS_PER_RANK * ranks
    reason = f"unless the hardware says otherwise, {RECIPE}: {CHUNKED_PREFILL_TOKENS_PER_RANK} per GPU"
    keys = (_world_size_key(role), "hardware.kernels.chunked_prefill_tokens")
    flags = [flag("--chunked-prefill-size", chunk, *keys, reason=reason)]
    if role != PREFILL:  # SGLang captures no decode graph in a server that only prefills
        batch = graph_batch_size(config, role)
        keys = ("engine.graph_batch_size", ROLE_KEY)
        reason = f"{RECIPE}'s, or beside engines that prefill a rank's requests of a step"
        flags.append(flag("--cuda-graph-max-bs-decode", batch, *keys, reason=reason))
    return flags


def kv_page(config: Config, role: str) -> list[Flag]:
    """Return the KV cache's page size for FlashMLA and TRT-LLM; SGLang chooses TileLang's itself."""
    key = "hardware.kernels.dsa_decode"
    is_other = config.hardware.kernels.dsa_decode == "tilelang" or config.hardware.kernels.attention
    return [] if is_other else [flag("--page-size", KV_PAGE_TOKENS, key, reason=f"{RECIPE}: the kernels' page")]


def attention_kernels(config: Config, role: str) -> list[Flag]:
    """Return the attention back ends that differ from SGLang's defaults."""
    kernels, prefill, decode = config.hardware.kernels, "hardware.kernels.dsa_prefill", "hardware.kernels.dsa_decode"
    if not config.model.architecture.index_n_heads:
        return []  # SGLang chooses the best dense kernel for each GPU
    if kernels.attention:
        return [flag("--attention-backend", kernels.attention, "hardware.kernels.attention")]
    return [
        flag("--attention-backend", "dsa", "model.architecture.index_n_heads"),
        flag("--dsa-prefill-backend", kernels.dsa_prefill or SPARSE_KERNEL, prefill),
        flag("--dsa-decode-backend", kernels.dsa_decode or SPARSE_KERNEL, decode),
    ]


def _expert_kernels(config: Config, role: str) -> list[Flag]:
    if not is_mixture(config):
        return []
    if has_deepep(config, role):
        chosen_by = ("engine.deepep", "rollout.fp8", "hardware.name")
        return [flag("--moe-a2a-backend", "deepep", *chosen_by), flag("--deepep-mode", "auto", *chosen_by)]
    name = "moe_runner_fp8" if config.rollout.fp8 else "moe_runner_bf16"
    runner = getattr(config.hardware.kernels, name)
    flags = [flag("--moe-runner-backend", runner, f"hardware.kernels.{name}", "rollout.fp8")] if runner else []
    return [*flags, *all_reduce(config, role)]


def all_reduce(config: Config, role: str) -> list[Flag]:
    """Return the flags of tensor-parallel all-reduce."""
    kernels, flags = config.hardware.kernels, []
    if kernels.allreduce_fusion and not has_dp_attention(config):
        keys = ("hardware.kernels.allreduce_fusion", "engine.dp_attention")
        reason = "the cookbook; tensor-parallel attention adds up after each layer"
        flags.append(flag("--flashinfer-allreduce-fusion-backend", "auto", *keys, reason=reason))
    if not kernels.custom_allreduce:
        flags.append(flag("--disable-custom-all-reduce", True, "hardware.kernels.custom_allreduce"))
    return flags


def speculation(config: Config, role: str) -> list[Flag]:
    """Return the flags of speculative decoding with the MTP layer."""
    steps, key = config.engine.mtp_steps, "engine.mtp_steps"
    if not steps:
        return []
    return [
        flag("--speculative-algorithm", "EAGLE", key, reason="how SGLang drafts with the model's own MTP layer"),
        flag("--speculative-num-steps", steps, key),
        flag("--speculative-eagle-topk", 1, key, reason=f"{RECIPE}: a chain, no tree"),
        flag("--speculative-num-draft-tokens", steps + 1, key, reason="a chain's drafts and the verified token"),
    ]


def disaggregation(config: Config, role: str) -> list[Flag]:
    """Return the flags that connect prefill and decode engines."""
    if role == UNIFIED:
        return []
    return [
        flag("--disaggregation-mode", role, ROLE_KEY),
        flag("--disaggregation-transfer-backend", config.engine.pd.transfer_backend, "engine.pd.transfer_backend"),
    ]


def _retraction(config: Config, role: str) -> list[Flag]:
    if role != DECODE:
        return []
    kept = "SGLang would reserve as much host memory as the cache has on the GPU, where the trainer sleeps"
    return [flag("--disaggregation-decode-retraction-backup", "cpu_tensor", ROLE_KEY, reason=kept)]


def node_count(config: Config, role: str) -> list[Flag]:
    """Return the flag with the number of nodes of an engine that spans several."""
    nodes = nodes_per_engine(config, role)
    return [flag("--nnodes", nodes, _world_size_key(role), "hardware.gpus_per_node")] if nodes > 1 else []


def _determinism(config: Config, role: str) -> list[Flag]:
    reason = "without it `sampling_seed` has no effect"
    chosen = [flag("--enable-deterministic-inference", True, "engine.deterministic", reason=reason)]
    return chosen if config.engine.deterministic else []


def _world_size_key(role: str) -> str:
    return "engine.pd.gpus_per_prefill_engine" if role == PREFILL else "engine.gpus_per_engine"


def _cpu_environment(role: str) -> list[Flag]:
    given = "SGLang on a CPU; envs/sglang-cpu/README.md"
    apart = [] if role == UNIFIED else [flag("MOONCAKE_PROTOCOL", "tcp", "hardware.device")]
    return [
        *apart,
        flag("SGLANG_USE_CPU_ENGINE", 1, "hardware.device"),
        flag("TORCHDYNAMO_DISABLE", 1, reason=given),
        flag("SGLANG_PYSPY_DUMP_BEFORE_CRASH", 0, reason=given),
        flag("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", 0, reason=given),
    ]


def _gpu_environment(config: Config, role: str) -> list[Flag]:
    if not has_deepep(config, role):
        return []
    return [
        flag(
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            deepep_tokens(config, role),
            ROLE_KEY,
            "engine.graph_batch_size",
            "engine.mtp_steps",
            reason=f"{RECIPE}, or the largest decode graph",
        ),
        flag("NVSHMEM_DISABLE_NCCL", 1, reason=f"{RECIPE}: DeepEP's NVSHMEM beside SGLang's NCCL"),
    ]

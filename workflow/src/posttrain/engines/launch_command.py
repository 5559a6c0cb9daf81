"""Command lines of engines, rendered from the configuration and nothing else.

SGLang's flags are spelled as version 0.5.23 parses them: `--dsa-*` (older: `--nsa-*`), `--attn-dp-size`
(older: `--enable-dp-attention --dp-size`), `--cuda-graph-max-bs-decode` (older: `--cuda-graph-max-bs`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.schema import Config

# A thread that spins while it waits takes the core that the trainer needs; on two cores that costs a factor
# of ten.
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
# Nothing an engine needs is on the network: its model is a folder.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Tokens of KV cache of an engine on a CPU, and its share of host memory: enough for small models beside a
# trainer.
CPU_MAX_TOTAL_TOKENS = 32768
CPU_MEM_FRACTION = 0.1
# envs/sglang-cpu/README.md gives the reason of each.
SGLANG_ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
# The GLM-5 recipe without prefill-decode disaggregation.
CUDA_GRAPH_MAX_DECODE_BATCH = 256
CHUNKED_PREFILL_TOKENS_PER_RANK = 2048
KV_PAGE_TOKENS = 64
WATCHDOG_SECONDS = 3600
DEEPEP_MAX_DISPATCH_TOKENS = 256


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine.

    Args:
        argv: Program and arguments.
        env: Variables to set on top of the environment.
        url: Where it answers.
        private_folders: Variables that each process gets an empty folder of its own for, removed with it.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str
    private_folders: tuple[str, ...] = ()


def render_engine_command(
    config: Config,
    engine_index: int,
    model_folder: Path,
    host: str,
    port: int,
    node_rank: int = 0,
    first_node: str = "",
    merge_requests: bool = False,
) -> EngineCommand:
    """Return the command that starts one process of an engine.

    Args:
        config: The resolved configuration.
        engine_index: Number of the engine in the run.
        model_folder: Checkpoint in Hub layout.
        host: Address it listens on.
        port: Port it listens on.
        node_rank: Its number among the nodes of this engine.
        first_node: "host:port" at which the engine's nodes meet; needed when it spans several.
        merge_requests: Let the embedded engine batch requests that wait; SGLang does so in any case.
    """
    python = config.engine.python or sys.executable
    private_folders: tuple[str, ...] = ()
    if config.engine.kind == "embedded":
        arguments, env = _embedded(config, merge_requests), {}
    elif config.hardware.device == "cpu":
        arguments, env = _sglang(config, engine_index) + _sglang_cpu(), SGLANG_ON_CPU
        # Every start leaves sockets and a cache folder behind; on GPUs the caches hold compiled kernels and
        # stay.
        private_folders = ("TMPDIR", "SGLANG_CACHE_DIR")
    else:
        nodes = _nodes(config, node_rank, first_node)
        arguments, env = _sglang(config, engine_index) + _sglang_cuda(config) + nodes, _cuda_env(config)
    argv = (python, *arguments, "--model-path", str(model_folder), "--host", host, "--port", str(port))
    threads = {"OMP_NUM_THREADS": str(config.engine.num_threads)} if config.engine.num_threads else {}
    env = {**QUIET_THREADS, **OFFLINE, **threads, **env}
    return EngineCommand(argv, env, f"http://{host}:{port}", private_folders)


def nodes_per_engine(config: Config) -> int:
    """Return how many nodes one engine spans."""
    return -(-config.engine.gpus_per_engine // config.hardware.gpus_per_node)


def _embedded(config: Config, merge_requests: bool) -> tuple[str, ...]:
    engine = config.engine
    return (
        "-m",
        "posttrain.engines.embedded",
        "--dtype",
        engine.dtype,
        "--served-threads",
        str(engine.num_threads),
        "--max-running-requests",
        str(engine.max_running_requests),
        "--no-deterministic" if merge_requests else "--deterministic",
    )


def _sglang(config: Config, engine_index: int) -> tuple[str, ...]:
    """Return what every SGLang server of a run gets."""
    engine = config.engine
    return (
        "-m",
        "sglang.launch_server",
        "--served-model-name",
        config.model.name,
        "--dtype",
        engine.dtype,
        "--max-running-requests",
        str(engine.max_running_requests),
        # Differs from engine to engine: where responses carry no seed of their own, they must not repeat each
        # other's.
        "--random-seed",
        str(config.training.seed + engine_index),
    )


def _sglang_cpu() -> tuple[str, ...]:
    return (
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
        "--mem-fraction-static",
        str(CPU_MEM_FRACTION),
        "--max-total-tokens",
        str(CPU_MAX_TOTAL_TOKENS),
        # An idle scheduler would otherwise occupy a core.
        "--sleep-on-idle",
        # Without it `sampling_seed` has no effect. A cached prefix is summed in another order: no prefix
        # cache then.
        "--enable-deterministic-inference",
        "--disable-radix-cache",
    )


def _sglang_cuda(config: Config) -> tuple[str, ...]:
    engine, ranks = config.engine, config.engine.gpus_per_engine
    arguments: tuple[str, ...] = (
        "--mem-fraction-static",
        str(engine.mem_fraction_static),
        "--tp-size",
        str(ranks),
        "--ep-size",
        str(ranks),
        "--attn-dp-size",
        str(ranks),
        "--moe-dense-tp-size",
        "1",
        "--enable-dp-lm-head",
        "--page-size",
        str(KV_PAGE_TOKENS),
        "--kv-cache-dtype",
        "bf16",
        "--chunked-prefill-size",
        str(CHUNKED_PREFILL_TOKENS_PER_RANK * ranks),
        "--cuda-graph-max-bs-decode",
        str(CUDA_GRAPH_MAX_DECODE_BATCH),
        "--watchdog-timeout",
        str(WATCHDOG_SECONDS),
    )
    if config.model.architecture.index_n_heads:
        sparse = ("--attention-backend", "dsa", "--dsa-prefill-backend", "flashmla_sparse")
        arguments += (*sparse, "--dsa-decode-backend", "flashmla_sparse")
    if _uses_deepep(config):
        arguments += ("--moe-a2a-backend", "deepep", "--deepep-mode", "auto")
    return arguments


def _nodes(config: Config, node_rank: int, first_node: str) -> tuple[str, ...]:
    nodes = nodes_per_engine(config)
    if nodes == 1:
        return ()
    assert first_node, f"an engine that spans {nodes} nodes needs first_node"
    return ("--nnodes", str(nodes), "--node-rank", str(node_rank), "--dist-init-addr", first_node)


def _cuda_env(config: Config) -> dict[str, str]:
    if not _uses_deepep(config):
        return {}
    dispatch = str(DEEPEP_MAX_DISPATCH_TOKENS)
    return {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": dispatch, "NVSHMEM_DISABLE_NCCL": "1"}


def _uses_deepep(config: Config) -> bool:
    """Return whether tokens go to experts through DeepEP: the recipe does so with FP8 weights."""
    return config.hardware.deepep and config.rollout.fp8 and config.engine.gpus_per_engine > 1

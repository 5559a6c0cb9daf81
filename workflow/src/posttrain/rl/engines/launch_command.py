"""Renders engines' command lines from the configuration alone.

`plan.flags.sglang_flags` defines the flags; this module adds interpreter, addresses and environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.plan.flags import sglang_flags
from posttrain.plan.flags.flag import as_arguments, as_environment
from posttrain.plan.flags.sglang_flags import UNIFIED, nodes_per_engine
from posttrain.rl.engines import sglang_server
from posttrain.rl.engines.responses import NO_WEIGHTS

# Every start of SGLang on a CPU leaves sockets and a cache folder behind; on GPUs the caches hold compiled kernels and
# are kept.
PRIVATE_ON_CPU = ("TMPDIR", "SGLANG_CACHE_DIR")
# With this format SGLang fills its parameters with noise and continues as after a load. An update recomputes everything
# derived from weights: MLA's two halves of kv_b_proj with the bucket that holds it, into the memory that CUDA graphs
# captured. Routers refer to their bias parameter; rotary tables are not parameters and stay. FP8 scales and the draft
# layer should update after noise as after a load; this is read from the source, and the test on a CPU covered neither.
# Source: SGLang 0.5.23, `DummyModelLoader` in srt/model_loader/loader.py, deepseek_weight_loader.py in
# srt/models/deepseek_common, weight_updater.py in srt/managers/scheduler_components.
WITHOUT_WEIGHTS = ("--load-format", "dummy", "--weight-version", NO_WEIGHTS)


@dataclass(frozen=True)
class EngineCommand:
    """Command and environment of an engine process.

    Args:
        argv: Program and arguments.
        env: Variables to set on top of the environment.
        url: URL of the engine.
        private_folders: Variables set to an empty private folder per process, which is removed with it.
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
    role: str = UNIFIED,
    gpus: Sequence[int] = (),
    without_weights: bool = False,
    bootstrap_port: int = 0,
) -> EngineCommand:
    """Return the command that starts one process of an engine.

    Args:
        config: The resolved configuration.
        engine_index: Number of the engine in the run.
        model_folder: Checkpoint in Hub layout.
        host: Address to listen on.
        port: Port to listen on.
        node_rank: Rank of this node within the engine.
        first_node: "host:port" of the rendezvous for an engine on several nodes.
        merge_requests: Let the embedded engine batch waiting requests; SGLang always does.
        role: "unified", or "prefill" or "decode" if separate.
        gpus: Visible GPUs of the node; by default all.
        without_weights: Load only config and tokenizer; an update sends the weights.
        bootstrap_port: Port of a prefill engine for KV transfers; 0: SGLang's default.
    """
    if config.engine.kind == "embedded":
        program: tuple[str, ...] = ("-m", "posttrain.rl.engines.embedded")
        flags = sglang_flags.embedded_flags(config, deterministic=not merge_requests)
        place: tuple[str, ...] = ()
    else:
        # Start the script by path, without its folder on sys.path: SGLang's environment may lack this package.
        program = ("-P", sglang_server.__file__)
        flags = sglang_flags.sglang_flags(config, role, engine_index)
        place = _place_among_nodes(config, role, node_rank, first_node)
        place += ("--disaggregation-bootstrap-port", str(bootstrap_port)) if bootstrap_port else ()
    address = ("--model-path", str(model_folder), "--host", host, "--port", str(port))
    weights = WITHOUT_WEIGHTS if without_weights else ()
    python = config.engine.python or sys.executable
    own = _address_of_caches(role, host) | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})
    return EngineCommand(
        argv=(python, *program, *as_arguments(flags), *weights, *place, *address),
        env={**as_environment(sglang_flags.environment_flags(config, role)), **own},
        url=f"http://{host}:{port}",
        private_folders=PRIVATE_ON_CPU if _is_sglang_on_cpu(config) else (),
    )


def _place_among_nodes(config: Config, role: str, node_rank: int, first_node: str) -> tuple[str, ...]:
    if nodes_per_engine(config, role) == 1:
        return ()
    assert first_node, f"an engine that spans {nodes_per_engine(config, role)} nodes needs first_node"
    return ("--node-rank", str(node_rank), "--dist-init-addr", first_node)


def _address_of_caches(role: str, host: str) -> dict[str, str]:
    """Return the address for KV transfers; by default SGLang would use a publicly reachable one."""
    return {} if role == UNIFIED else {"SGLANG_HOST_IP": host}


def _is_sglang_on_cpu(config: Config) -> bool:
    return config.engine.kind == "sglang" and config.hardware.device == "cpu"

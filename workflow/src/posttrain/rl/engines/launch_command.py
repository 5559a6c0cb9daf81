"""Command lines of engines, rendered from the configuration and nothing else.

The flags are spelled in `plan.flags.sglang_flags`; here they become a process: interpreter, addresses, environment.
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
# stay.
PRIVATE_ON_CPU = ("TMPDIR", "SGLANG_CACHE_DIR")
# SGLang then fills its parameters with noise and goes on as after a load. What it derives from weights it derives
# anew from an update: MLA's two halves of kv_b_proj with the bucket that holds it, into the memory that CUDA graphs
# captured. Routers refer to the parameter of their bias; rotary tables are no parameters and stay. FP8 scales and the
# draft's layer are updated after noise as after a first load; that is read from its source, and was run on a CPU
# without either. Source: SGLang 0.5.23, `DummyModelLoader` in srt/model_loader/loader.py, deepseek_weight_loader.py in
# srt/models/deepseek_common, weight_updater.py in srt/managers/scheduler_components.
WITHOUT_WEIGHTS = ("--load-format", "dummy", "--weight-version", NO_WEIGHTS)


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
        host: Address it listens on.
        port: Port it listens on.
        node_rank: Its number among the nodes of this engine.
        first_node: "host:port" at which the engine's nodes meet; needed when it spans several.
        merge_requests: Let the embedded engine batch requests that wait; SGLang does so in any case.
        role: "unified", or "prefill" or "decode" when they are apart.
        gpus: Those of its node that it sees; by default all.
        without_weights: Read config and tokenizer alone; an update brings the weights.
        bootstrap_port: Where an engine that prefills meets those that decode; 0: SGLang's own choice.
    """
    if config.engine.kind == "embedded":
        program: tuple[str, ...] = ("-m", "posttrain.rl.engines.embedded")
        flags = sglang_flags.embedded_flags(config, deterministic=not merge_requests)
        place: tuple[str, ...] = ()
    else:
        # By its path, without its own folder on the path to modules: SGLang's environment need not have this package.
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
    """Return where KV caches are asked for: without it SGLang takes an address of the machine that others reach."""
    return {} if role == UNIFIED else {"SGLANG_HOST_IP": host}


def _is_sglang_on_cpu(config: Config) -> bool:
    return config.engine.kind == "sglang" and config.hardware.device == "cpu"

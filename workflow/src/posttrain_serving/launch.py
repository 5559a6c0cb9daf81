"""Plans a launch: from a request and a checkpoint to processes, their files, and notes.

Flags come from `plan.flags`, as for training, and from `flags`; this module adds engine, checkpoint, address and node
rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.config.engine import PrefillDecode
from posttrain.config.schema import Config, Hardware
from posttrain.errors import raise_if_any
from posttrain.plan.flags.flag import Flag, as_arguments, flag
from posttrain.plan.flags.sglang_flags import DECODE, PREFILL, UNIFIED, embedded_flags
from posttrain.plan.sizing.engine import SERVING_SHARE
from posttrain.plan.timing.serving_load import ServedRow
from posttrain.rl.engines import sglang_server
from posttrain_serving.checkpoint import Checkpoint
from posttrain_serving.expected_speed import expected_speed
from posttrain_serving.fit import Size, choose_size
from posttrain_serving.flags.serving_flags import (
    CARD,
    MEM_FRACTION,
    MTP_STEPS,
    PUBLISHED,
    index_cache,
    ready_seconds,
    serving_environment,
    serving_flags,
)
from posttrain_serving.flags.trtllm_flags import YAML_FILE, trtllm_flags, trtllm_yaml
from posttrain_serving.flags.vllm_flags import MEMORY_UTILIZATION, compiled_at_start, vllm_flags
from posttrain_serving.notes import notes_of
from posttrain_serving.serve_request import LOCAL, ServeRequest, check_serve_request

# Ports of the rendezvous of an engine's nodes, and of prefill and decode engines; below the ephemeral ports.
MEETING_PORT, BOOTSTRAP_PORT = 20000, 8998
PLACE = "this node's place among those of the engine"


@dataclass(frozen=True)
class Process:
    """One process to start.

    Args:
        title: Title of the process.
        program: The program and, if it precedes all flags, the checkpoint.
        flags: Flags of the command line.
        environment: Environment variables.
        is_ours: Requires the secret of `rl.engines.secret` in requests.
    """

    title: str
    program: tuple[str, ...]
    flags: tuple[Flag, ...]
    environment: tuple[Flag, ...] = ()
    is_ours: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments."""
        return (*self.program, *as_arguments(self.flags))


@dataclass(frozen=True)
class Launch:
    """The complete plan for serving a checkpoint.

    Args:
        headline: Summary in one sentence.
        processes: Processes to start, each on its own node except a router.
        files: Name -> content of files that must be in the engine's working folder.
        notes: Notes to read before the start.
        size: Size of one engine.
        expected: Expected speed; empty if not predicted.
        ready_seconds: Time limit to become healthy.
        compiles: Kernels that the engine compiles on this machine at its first start; empty: none.
    """

    headline: str
    processes: tuple[Process, ...]
    files: Mapping[str, Mapping[str, object]]
    notes: tuple[str, ...]
    size: Size
    expected: tuple[ServedRow, ...]
    ready_seconds: float
    compiles: str


def plan_launch(
    serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, others: Sequence[Hardware] = ()
) -> Launch:
    """Return the launch plan of a checkpoint.

    Args:
        serve_request: The request.
        checkpoint: The checkpoint.
        config: Has the hardware; its model and engine are ignored.
        others: Further hardware to suggest.

    Raises:
        ConfigError: The hardware or engine does not support the request; the message names the nearest alternative.
    """
    model = replace(config.model, name=checkpoint.name, architecture=checkpoint.architecture)
    config = replace(config, model=model)
    raise_if_any(list(check_serve_request(serve_request, checkpoint.precision, config, others)))
    size = choose_size(serve_request, checkpoint.precision, config, others)
    config = engine_config(serve_request, checkpoint, config, size)
    make = {"sglang": _sglang, "vllm": _vllm, "trtllm": _trtllm, "embedded": _embedded}[serve_request.engine]
    processes = tuple(make(serve_request, checkpoint, config, size))
    files = {YAML_FILE: trtllm_yaml(serve_request.goal)} if serve_request.engine == "trtllm" else {}
    notes = notes_of(serve_request, checkpoint, config, [item for process in processes for item in process.flags])
    gpus = f"{size.num_gpus} of {config.hardware.name}, {size.nodes} node{'s' if size.nodes > 1 else ''}"
    twice = " each for prefill and decode" if serve_request.prefill_apart else ""
    needed = f"{size.gib_per_gpu:.1f} GiB a GPU for weights and one request of 32,768 tokens"
    what = f"{checkpoint.place} in {checkpoint.precision} by {serve_request.engine}"
    headline = f"{what} on {gpus}{twice}, for {serve_request.goal}: {needed}"
    expected = expected_speed(serve_request, checkpoint.precision, config, size)
    compiled = compiled_at_start(config, serve_request.engine, checkpoint.precision)
    seconds = ready_seconds(config, bool(compiled))
    return Launch(headline, processes, files, tuple(notes), size, expected, seconds, compiled)


def url_of(serve_request: ServeRequest) -> str:
    """Return the URL of an engine on this machine for local clients."""
    host = "127.0.0.1" if serve_request.host in ("0.0.0.0", "::", "localhost") else serve_request.host
    return f"http://{f'[{host}]' if ':' in host else host}:{serve_request.port}"


def engine_config(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, size: Size) -> Config:
    """Return the configuration with the serving engine, from which flags are derived."""
    hardware, arch = config.hardware, checkpoint.architecture
    drafts = serve_request.goal == "latency" and arch.num_nextn_predict_layers > 0 and hardware.kernels.speculative
    engine = replace(
        config.engine,
        kind="embedded" if serve_request.engine == "embedded" else "sglang",
        gpus_per_engine=size.num_gpus,
        num_engines=1,
        own_nodes=0,
        sleep="never",
        deepep=False,
        deterministic=False,
        dp_attention=size.attention == "data_parallel",
        dtype="float32" if hardware.device == "cpu" else "bfloat16",
        mem_fraction_static=_mem_fraction(serve_request, checkpoint, hardware, size),
        # The NVFP4 model card has no drafts, and a community checkpoint may lack the MTP layer.
        mtp_steps=MTP_STEPS if drafts and checkpoint.precision != "nvfp4" else 0,
        pd=PrefillDecode(int(serve_request.prefill_apart), size.num_gpus),
    )
    rollout = replace(config.rollout, fp8=checkpoint.precision == "fp8")
    return replace(config, engine=engine, rollout=rollout, nodes=size.nodes)


def _mem_fraction(serve_request: ServeRequest, checkpoint: Checkpoint, hardware: Hardware, size: Size) -> float:
    if published := PUBLISHED.get((hardware.name, checkpoint.precision, serve_request.goal)):
        return published[0]
    usual = MEMORY_UTILIZATION if serve_request.engine == "vllm" else MEM_FRACTION
    return usual if size.gib_per_gpu <= usual * hardware.memory_gib_per_gpu else SERVING_SHARE


def _sglang(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, size: Size) -> list[Process]:
    roles = (PREFILL, DECODE) if serve_request.prefill_apart else (UNIFIED,)
    is_cpu = config.hardware.device == "cpu"
    python = serve_request.python or "python3"
    program = (python, "-P", sglang_server.__file__) if is_cpu else (python, "-m", "sglang.launch_server")
    found = []
    for role in roles:
        flags = serving_flags(config, checkpoint.precision, serve_request.goal, role, checkpoint.method)
        for rank in range(size.nodes):
            first = f"{serve_request.first_node or _host_of(role, 0)}:{MEETING_PORT}"
            place = [flag("--node-rank", rank, reason=PLACE), flag("--dist-init-addr", first, reason="where they meet")]
            own = [
                flag("--model-path", checkpoint.place, reason="the checkpoint"),
                *_revision(checkpoint),
                flag("--served-model-name", serve_request.name or checkpoint.name, reason="what clients call it"),
                *flags,
                *([index_cache()] if serve_request.index_cache else []),
                *_trusted(checkpoint),
                *(place if size.nodes > 1 else []),
                *_address(serve_request, role),
            ]
            title = _title(role, rank, size.nodes)
            environment = serving_environment(config, role)
            found.append(Process(title, program, tuple(own), tuple(environment), is_cpu))
    return found + ([_router(serve_request)] if serve_request.prefill_apart else [])


def _revision(checkpoint: Checkpoint) -> list[Flag]:
    pinned = checkpoint.revision
    return [flag("--revision", pinned, reason="the commit that the model's file pins")] if pinned else []


def _router(serve_request: ServeRequest) -> Process:
    """Return a router: one address that sends each request to a pair. Training needs none (`prefill_pairs`)."""
    flags = (
        flag("--pd-disaggregation", True, reason="each request goes to an engine that prefills and one that decodes"),
        flag(
            "--prefill", f"http://{_host_of(PREFILL, 0)}:{serve_request.port}", reason="where the first of them answers"
        ),
        flag(
            "--decode", f"http://{_host_of(DECODE, 0)}:{serve_request.port}", reason="where the first of them answers"
        ),
        *_address(serve_request, UNIFIED),
    )
    return Process(
        "the router, on any node", (serve_request.python or "python3", "-m", "sglang_router.launch_router"), flags
    )


def _vllm(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, size: Size) -> list[Process]:
    found = []
    for rank in range(size.nodes):
        place = [
            flag("--node-rank", rank, reason=PLACE),
            flag("--master-addr", serve_request.first_node or _host_of(UNIFIED, 0), reason="where they meet"),
            *([flag("--headless", True, reason="the first node alone answers")] if rank else []),
        ]
        flags = (
            *_revision(checkpoint),
            flag("--served-model-name", serve_request.name or checkpoint.name, reason="what clients call it"),
            *vllm_flags(config),
            *(place if size.nodes > 1 else []),
            *_address(serve_request, UNIFIED),
        )
        found.append(Process(_title(UNIFIED, rank, size.nodes), ("vllm", "serve", checkpoint.place), flags))
    return found


def _trtllm(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, size: Size) -> list[Process]:
    flags = (*_address(serve_request, UNIFIED), *trtllm_flags(config, serve_request.goal))
    return [Process(_title(UNIFIED, 0, 1), ("trtllm-serve", checkpoint.place), flags)]


def _embedded(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, size: Size) -> list[Process]:
    flags = (
        flag("--model-path", checkpoint.place, reason="the checkpoint"),
        *(
            _for_goal(item, serve_request)
            for item in embedded_flags(config, deterministic=serve_request.goal == "latency")
        ),
        *_address(serve_request, UNIFIED),
    )
    program = (sys.executable, "-m", "posttrain.rl.engines.embedded")
    environment = tuple(serving_environment(config))
    return [Process("the embedded engine", program, flags, environment, is_ours=True)]


def _for_goal(item: Flag, serve_request: ServeRequest) -> Flag:
    if "deterministic" not in item.name:
        return item
    reasons = {"latency": "each request is a batch of its own", "throughput": "requests that wait are merged"}
    return replace(item, reason=reasons[serve_request.goal])


def _trusted(checkpoint: Checkpoint) -> list[Flag]:
    if checkpoint.precision != "nvfp4" or checkpoint.is_folder:
        return []
    reason = f"{CARD}; it runs code of the repository, so read what it brings"
    return [flag("--trust-remote-code", True, reason=reason)]


def _address(serve_request: ServeRequest, role: str) -> list[Flag]:
    is_local = serve_request.host in LOCAL
    # The router runs on another node, so listen on this node's address for that network only.
    host = _host_of(role, 0) if role != UNIFIED and is_local else serve_request.host
    reason = "asked for: who reaches it may ask"
    if is_local:
        alone = "this machine alone; others with --host, behind something that knows who may ask"
        reason = alone if role == UNIFIED else "the router reaches it, and whoever else is in its network"
    flags = [
        flag("--host", host, reason=reason),
        flag("--port", serve_request.port, reason="asked for, or the guides'"),
    ]
    if role != PREFILL:
        return flags
    meet = "where engines that decode find it; SGLang's own choice"
    return [*flags, flag("--disaggregation-bootstrap-port", BOOTSTRAP_PORT, reason=meet)]


def _host_of(role: str, rank: int) -> str:
    return f"node{rank}" if role == UNIFIED else f"{role}{rank}"


def _title(role: str, rank: int, nodes: int) -> str:
    what = "the engine" if role == UNIFIED else f"the engine that {'prefills' if role == PREFILL else 'decodes'}"
    return f"{what}, on {_host_of(role, rank)} of {nodes} nodes" if nodes > 1 or role != UNIFIED else what

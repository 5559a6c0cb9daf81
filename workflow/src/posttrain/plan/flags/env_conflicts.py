"""Known conflicts of environment variables with each other or with the configuration.

The plan checks the variables that it sets; a rehearsal also those inherited from the shell.

Each row names its source. Versions: torch 2.14.1, NCCL 2.30.7, Transformer Engine 2.20.2, NVSHMEM 3.4.5, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from posttrain.config.derived import trainer_nodes
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.flags.environment import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE,
    LOOPBACK,
    WORK_QUEUES,
    has_saver,
    needs_one_queue,
    started_with,
    trainer_environment,
)
from posttrain.plan.flags.flag import Flag, as_arguments, as_environment
from posttrain.plan.flags.sglang_flags import environment_flags, nodes_per_engine, roles, sglang_flags

TRAINER, ENGINE = "trainer", "engine"
Variables = Mapping[str, str]
# Variables of torch, NCCL, gloo, NVSHMEM, UCX, CUDA and Transformer Engine; preloaded libraries; memory savers.
TOLD_PREFIXES = ("PYTORCH_", "TORCH_", "NCCL_", "GLOO_", "NVSHMEM_", "UCX_", "CUDA_", "NVTE_", "LD_PRELOAD", "TMS_")
SEGMENTS = "expandable segments cannot be unmapped by a memory saver, nor shared as plain CUDA memory"


@dataclass(frozen=True)
class EnvConflict:
    """A known conflict.

    Args:
        who: Affected processes: "trainer", "engine".
        names: Variables involved; the problem shows their values.
        is_bad: Detects the conflict from the configuration, the kind of process and its variables.
        allowed: The correct setting, with the reason.
        source: Source of the rule.
    """

    who: tuple[str, ...]
    names: tuple[str, ...]
    is_bad: Callable[[Config, str, Variables], bool]
    allowed: str
    source: str


def environments(config: Config) -> dict[str, list[Flag]]:
    """Return kind of process -> its variables, as set by `cluster.ranks` and `rl.engines.launch_command`.

    The kinds are "trainer" and "engine", or with separate prefill "engine.prefill" and "engine.decode".
    """
    engines = {f"{ENGINE}.{role}" if len(roles(config)) > 1 else ENGINE: role for role in roles(config)}
    of_engines = {kind: environment_flags(config, role) for kind, role in engines.items()}
    return {TRAINER: trainer_environment(config), **of_engines}


def inherited_by_all(shell: Variables) -> dict[str, str]:
    """Return a shell's variables that affect communication, kernels and memory of processes started from it."""
    return {name: value for name, value in started_with(shell, {}).items() if name.startswith(TOLD_PREFIXES)}


def find_env_conflicts(config: Config, inherited: Variables | None = None) -> list[Problem]:
    """Return the known conflicts in the environments of trainer ranks and GPU engines.

    Args:
        config: The resolved configuration.
        inherited: Inherited variables, as filtered by `environment.started_with`.
    """
    if config.hardware.device != "cuda":
        return []
    problems = []
    for kind, flags in environments(config).items():
        variables, who = {**(inherited or {}), **as_environment(flags)}, kind.partition(".")[0]
        for row in BAD_PAIRS:
            if who in row.who and row.is_bad(config, kind, variables):
                found = " ".join(f"{name}={variables[name]}" for name in row.names if name in variables)
                value = f"{found or f'no {row.names[0]}'} in {who} processes"
                remedy = f"set it there, or leave it out, also in the shell ({row.source})"
                problems.append(Problem("environment-conflict", f"site.{who}_environment", value, row.allowed, remedy))
    return list(dict.fromkeys(problems))


def _is_expandable(variables: Variables) -> bool:
    """Return whether the setting that torch reads, the first one present, asks for expandable segments."""
    chosen = next((variables[name] for name in ALLOCATOR_VARIABLES if name in variables), "")
    return EXPANDABLE.lower() in chosen.lower().replace(" ", "")


def _engine_saves_memory(config: Config, kind: str, variables: Variables) -> bool:
    role = kind.partition(".")[2] or roles(config)[0]
    is_asked = config.engine.kind == "sglang" and "--enable-memory-saver" in as_arguments(sglang_flags(config, role))
    return is_asked or has_saver(variables)


def _spans_nodes(config: Config, kind: str) -> bool:
    if kind == TRAINER:
        return trainer_nodes(config) > 1
    return nodes_per_engine(config, kind.partition(".")[2] or roles(config)[0]) > 1


def _links_span_nodes(config: Config, kind: str) -> bool:
    return config.hardware.linked_gpus > config.hardware.gpus_per_node and _spans_nodes(config, kind)


def _attends_with_transformer_engine(config: Config) -> bool:
    return not config.model.architecture.index_n_heads


def _is(variables: Variables, name: str, value: str) -> bool:
    return variables.get(name) == value


_REGISTERED = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
_SAVER_NAMES = (*ALLOCATOR_VARIABLES, "LD_PRELOAD", "TMS_INIT_ENABLE")
BAD_PAIRS = (
    EnvConflict(
        (TRAINER,),
        _SAVER_NAMES,
        lambda config, kind, its: _is_expandable(its) and has_saver(its),
        f"one of both: {SEGMENTS}",
        "fzyzcjy/torch_memory_saver#24, pytorch/pytorch#130330",
    ),
    EnvConflict(
        (ENGINE,),
        _SAVER_NAMES,
        lambda config, kind, its: _is_expandable(its) and _engine_saves_memory(config, kind, its),
        f"no expandable_segments:True in engines, which have --enable-memory-saver: {SEGMENTS}",
        "fzyzcjy/torch_memory_saver#24, radixark/miles#2852, THUDM/slime#2188",
    ),
    EnvConflict(
        (TRAINER,),
        (*ALLOCATOR_VARIABLES, _REGISTERED),
        lambda config, kind, its: (
            _is_expandable(its) and _is(its, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
        ),
        "one of both: torch switches the hook off where segments expand",
        "torch, ProcessGroupNCCL.cpp",
    ),
    EnvConflict(
        (TRAINER,),
        (WORK_QUEUES,),
        lambda config, kind, its: needs_one_queue(config) and not _is(its, WORK_QUEUES, "1"),
        f"{WORK_QUEUES}=1 with tensor or context parallelism before Blackwell",
        "NVIDIA/Megatron-LM, megatron/training/arguments.py",
    ),
    EnvConflict(
        (TRAINER, ENGINE),
        ("NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"),
        lambda config, kind, its: (
            _is(its, "NCCL_CUMEM_ENABLE", "0")
            and (_is(its, "NCCL_MNNVL_ENABLE", "1") or _links_span_nodes(config, kind))
        ),
        "cuMem where NVLink joins nodes: without it NCCL takes the network instead",
        "NVIDIA/nccl, src/mnnvl.cc",
    ),
    EnvConflict(
        (TRAINER,),
        ("NVSHMEM_REMOTE_TRANSPORT",),
        lambda config, kind, its: (
            config.trainer.deepep and _spans_nodes(config, kind) and _is(its, "NVSHMEM_REMOTE_TRANSPORT", "none")
        ),
        "a transport between nodes for DeepEP",
        "NVSHMEM, environment variables",
    ),
    EnvConflict(
        (TRAINER,),
        ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"),
        lambda config, kind, its: (
            _attends_with_transformer_engine(config)
            and _is(its, "NVTE_FLASH_ATTN", "0")
            and _is(its, "NVTE_FUSED_ATTN", "0")
        ),
        "one of both on: what is left holds the scores of all pairs of tokens, which no plan counts",
        "Transformer Engine, attention/dot_product_attention/utils.py",
    ),
    EnvConflict(
        (TRAINER, ENGINE),
        ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
        lambda config, kind, its: (
            config.nodes > 1 and any(_is(its, f"{library}_SOCKET_IFNAME", LOOPBACK) for library in ("NCCL", "GLOO"))
        ),
        "an interface that reaches the other nodes",
        "NCCL, environment variables",
    ),
    EnvConflict(
        (TRAINER,),
        ("TORCH_NCCL_BLOCKING_WAIT",),
        lambda config, kind, its: _is(its, "TORCH_NCCL_BLOCKING_WAIT", "1"),
        "0: with 1 torch has no watchdog, and nothing is recorded of a hang",
        "torch, ProcessGroupNCCL.cpp",
    ),
)

"""Environments of trainer ranks, and the part of them that engines share.

Other variables are inherited from the parent process, except torch's allocator settings: those come only from the plan
and the site's file (`started_with`).

Sources: torch 2.14.1, `c10/core/AllocatorConfig.h` for the names of the allocator's settings, `FlightRecorder.hpp` and
`ProcessGroupNCCL.hpp` of `torch/csrc/distributed/c10d` for those of the flight recorder; Megatron-LM,
`megatron/training/arguments.py`, for CUDA's work queues.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import Flag, as_environment, flag

# Linux's name of the loopback interface.
LOOPBACK = "lo"
# By default glibc returns freed memory at the end of the heap to the system, and every step faults it in again.
KEPT_BYTES, OWN_MAPPING_BYTES = 2**28, 2**25
# torch reads the first that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE, WORK_QUEUES = "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS"
# Number of collectives that a rank records, torch's own default. The older variable controls the pipe.
RECORDED_CALLS, RECORDER_VARIABLES = 2000, ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The library that torch_memory_saver preloads, so that a process can release its memory without ending.
SAVER_LIBRARY = "torch_memory_saver"
BLACKWELL = (10, 0)
NO_INFINIBAND = "NCCL_IB_DISABLE"


def started_with(inherited: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a trainer rank or an engine.

    The allocator's variables are not inherited: a variable exported for the trainer would also reach the engines, and
    vice versa, where it may do harm.

    Args:
        inherited: Environment of the parent process.
        own: Variables from the plan.
    """
    return {name: value for name, value in inherited.items() if name not in ALLOCATOR_VARIABLES} | dict(own)


def thread_and_memory_environment(config: Config) -> list[Flag]:
    """Return the variables that divide cores and host memory between trainer and engine."""
    spinning = "a thread that spins while it waits takes the core the other needs"
    flags = [flag("OMP_WAIT_POLICY", "PASSIVE", reason=f"trainer and engine share the cores: {spinning}")]
    if _on_cuda(config):
        return flags
    kept = "memory that a step frees is the next one's, not the system's"
    hidden = "torch, Megatron and SGLang ask whether there are GPUs, not whether they are to be used"
    return [
        *flags,
        flag("CUDA_VISIBLE_DEVICES", "", "hardware.device", reason=hidden),
        flag("MALLOC_TRIM_THRESHOLD_", KEPT_BYTES, "hardware.device", reason=kept),
        flag("MALLOC_MMAP_THRESHOLD_", OWN_MAPPING_BYTES, "hardware.device", reason=kept),
    ]


def trainer_environment(config: Config, num_nodes: int = 0) -> list[Flag]:
    """Return the variables of every trainer rank, without those of its position among the ranks.

    Args:
        config: The resolved configuration.
        num_nodes: Number of nodes with ranks; 0 means the configuration's.
    """
    return [
        *thread_and_memory_environment(config),
        *(_cuda_environment(config) if _on_cuda(config) else ()),
        *network_flags(config, num_nodes or config.nodes),
        *site_environment(config, "trainer_environment"),
    ]


def network_flags(config: Config, num_nodes: int) -> list[Flag]:
    """Return the network interface between ranks on `num_nodes` nodes, if it is known."""
    interface, key = (
        (LOOPBACK, "nodes") if num_nodes == 1 else (config.site.network_interface, "site.network_interface")
    )
    return [flag(f"{library}_SOCKET_IFNAME", interface, key) for library in ("GLOO", "NCCL") if interface]


def site_environment(config: Config, key: str) -> list[Flag]:
    """Return the variables from the site's file.

    Args:
        config: The resolved configuration.
        key: "trainer_environment" or "engine_environment".
    """
    pairs = (item.partition("=") for item in getattr(config.site, key))
    return [flag(name, value, f"site.{key}") for name, _, value in pairs]


def hardware_environment(config: Config, is_alone: bool) -> list[Flag]:
    """Return the variables from the hardware's file for engines.

    Args:
        config: The resolved configuration.
        is_alone: The engine is on a single node; between nodes InfiniBand is required.
    """
    pairs = (item.partition("=") for item in config.hardware.kernels.environment)
    key = "hardware.kernels.environment"
    return [flag(name, value, key) for name, _, value in pairs if is_alone or name != NO_INFINIBAND]


def needs_one_queue(config: Config) -> bool:
    """Return whether CUDA must launch kernels in call order, which Blackwell does by default."""
    parallel = config.parallel
    overlaps = parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1
    return _on_cuda(config) and overlaps and capability(config) < BLACKWELL


def capability(config: Config) -> tuple[int, int]:
    """Return the GPU's compute capability; (0, 0) without one."""
    major, _, minor = config.hardware.compute_capability.partition(".")
    return (int(major), int(minor)) if major else (0, 0)


def has_saver(variables: Mapping[str, str]) -> bool:
    """Return whether a process can release its GPU memory through a preloaded memory saver."""
    return SAVER_LIBRARY in variables.get("LD_PRELOAD", "") or variables.get("TMS_INIT_ENABLE", "0") != "0"


def _cuda_environment(config: Config) -> list[Flag]:
    device, flags = "hardware.device", []
    given = as_environment(site_environment(config, "trainer_environment"))
    if not has_saver(given) and not any(name in given for name in ALLOCATOR_VARIABLES):
        segments = "rows differ in length from micro-batch to micro-batch, and leave holes in memory"
        flags.append(flag("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE, device, reason=segments))
    if needs_one_queue(config):
        keys = (device, "parallel.tensor_model_parallel_size", "parallel.context_parallel_size")
        queue = "Megatron overlaps communication with computation only with one work queue, before Blackwell"
        flags.append(flag(WORK_QUEUES, 1, *keys, "hardware.compute_capability", reason=queue))
    recorded = "what a rank's collectives were when it hangs"
    flags += [flag(name, RECORDED_CALLS, device, reason=recorded) for name in RECORDER_VARIABLES]
    return [*flags, flag("TORCH_NCCL_DUMP_ON_TIMEOUT", 1, device, reason=recorded)]


def _on_cuda(config: Config) -> bool:
    return config.hardware.device == "cuda"

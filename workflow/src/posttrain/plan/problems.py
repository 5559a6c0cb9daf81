"""Problems and warnings that follow from a plan's numbers.

The Snakefile checks the problems while it is parsed, so that a dry run rejects an impossible configuration before any
job starts; the plan's page shows the same list. Fitting layouts are searched only for a remedy's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from posttrain.config.derived import (
    engine_gpus,
    engine_nodes,
    proves_weights,
    room_for_engines,
    takes_turns,
    uses_engines,
    weight_transport,
)
from posttrain.config.schema import Config
from posttrain.config.site_rules import time_limit_minutes
from posttrain.errors import Problem
from posttrain.plan.flags.env_conflicts import find_env_conflicts
from posttrain.plan.flags.indexer_kernel import check_indexer_kernel
from posttrain.plan.flags.sparse_kernels import check_sparse_kernel
from posttrain.plan.sizing.capacity import check_declared, check_typical
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.export_check import check_export_memory
from posttrain.plan.sizing.layout import propose_layouts
from posttrain.plan.sizing.layout_choice import requests_that_fit
from posttrain.plan.sizing.memory_phases import (
    NO_STAGE,
    PhaseMemory,
    capacity_gib,
    host_gib_by_phase,
    own_engine_memory,
    phase_memory,
)
from posttrain.plan.sizing.storage import storage
from posttrain.plan.sizing.tiny_model import check_made
from posttrain.plan.sizing.untracked_memory import uncertainty_gib, untracked_terms
from posttrain.plan.timing.duration import Bandwidths
from posttrain.plan.timing.rollout_of_step import (
    evaluation_interval,
    evaluation_share,
)
from posttrain.plan.timing.step_time import (
    step_durations,
    step_with_save_seconds,
    sync_seconds,
)
from posttrain.readable import counted, format_seconds


def find_problems(config: Config) -> list[Problem]:
    """Return the reasons why a resolved configuration cannot run on this hardware and site."""
    phases = phase_memory(_taking_turns(config))
    has_engines = uses_engines(config)
    alone = [*_check_trainer(config, phases), *(_check_engine(config) if has_engines else ())]
    return [
        *(check_made(config.model.architecture) if config.model.source.kind == "made" else ()),
        *alone,
        *check_export_memory(config),
        # A part that is too large alone gets no second problem for the phases that it shares.
        *(() if alone else _check_awake(config, phases)),
        *_check_all_awake(config),
        *(_check_engine_count(config) if has_engines else ()),
        *_check_time_limit(config),
        *_check_evaluation_share(config),
        *check_declared(config, storage(config), _host_gib(config)),
        *find_env_conflicts(config),
        *check_sparse_kernel(config),
        *check_indexer_kernel(config),
    ]


def find_warnings(config: Config) -> list[Problem]:
    """Return possible problems that are not certain enough to reject the run."""
    return [
        *check_typical(config, storage(config), _host_gib(config)),
        *_check_transport(config),
        *_check_proof(config),
        *_check_margin(config),
        *_check_node_names(config),
    ]


def _check_trainer(config: Config, phases: Sequence[PhaseMemory]) -> Iterator[Problem]:
    # If engines have their own nodes, ranks have no other phases that could be too large.
    phase_names = ("train", "old_logprobs", "mismatch", "save")
    fullest = _fullest(phases, (*phase_names, "weight_sync") if config.engine.own_nodes else phase_names)
    if fullest.gpu_gib <= capacity_gib(config):
        return
    best = next((layout for layout in propose_layouts(config) if layout.fits), None)
    if best:
        sizes = " ".join(f"parallel.{name}={size}" for name, size in best.sizes.items())
        remedy = f"set='{sizes}', or trainer.optimizer_cpu_offload=true"
    else:
        remedy = requests_that_fit(config, {})
    yield Problem("trainer-exceeds-memory", "parallel", _amount(fullest), _limit(config), remedy)


def _check_awake(config: Config, phases: Sequence[PhaseMemory]) -> Iterator[Problem]:
    """Yield a problem if memory is too small while engines are awake, on their GPUs."""
    theirs, fraction = own_engine_memory(config) or phases, config.engine.mem_fraction_static
    fullest = _fullest(theirs, ("rollout", "weight_sync"))
    excess = fullest.gpu_gib - capacity_gib(config)
    if excess > 0 and config.hardware.device == "cuda":
        lower = fraction - excess / config.hardware.memory_gib_per_gpu
        remedy = f"{max(0.0, lower - 0.005):.2f} or less"
        allowed = _limit(config)
        yield Problem(
            "engine-exceeds-memory", "engine.mem_fraction_static", f"{fraction}: {_amount(fullest)}", allowed, remedy
        )


def _check_engine(config: Config) -> Iterator[Problem]:
    served, fraction = engine_memory(config), config.engine.mem_fraction_static
    memory_gib = config.hardware.memory_gib_per_gpu
    sizes = {"engine.gpus_per_engine": served, "engine.pd.gpus_per_prefill_engine": served.prefill}
    for key, of_engine in sizes.items():
        if of_engine and of_engine.weights_gib_per_gpu > fraction * memory_gib:
            found = f"{of_engine.weights_gib_per_gpu:.1f} GiB of weights per GPU"
            allowed = f"less than {fraction * memory_gib:.1f} GiB (engine.mem_fraction_static of {memory_gib:g} GiB)"
            yield Problem("weights-exceed-engine", key, found, allowed, "more GPUs per engine, or rollout.fp8=true")


def _check_engine_count(config: Config) -> Iterator[Problem]:
    count, existing, wanted = config.engine.num_engines, room_for_engines(config), engine_gpus(config)
    if config.hardware.device == "cuda" and wanted > existing:
        nodes = counted(len(engine_nodes(config)), "node")
        found, allowed = f"{wanted} GPUs in {count} engines", f"at most {existing} GPUs ({nodes})"
        yield Problem(
            "engines-exceed-gpus", "engine.num_engines", found, allowed, "fewer engines or fewer GPUs per engine"
        )


def _check_time_limit(config: Config) -> Iterator[Problem]:
    """Yield a problem if the time limit is too short for one step with its checkpoint."""
    needed = step_with_save_seconds(config, Bandwidths().shared_storage)
    limit = config.site.slurm.time_limit
    if config.site.launcher == "slurm" and needed > 60 * time_limit_minutes(limit):
        allowed = f"more than {needed / 60:,.0f}m, which a step with its checkpoint takes by the plan"
        yield Problem(
            "time-limit-too-short", "site.slurm.time_limit", limit, allowed, "ask for more time, or for more nodes"
        )


def _taking_turns(config: Config) -> Config:
    """Return the configuration with engines that sleep if they run on GPUs."""
    return replace(config, engine=replace(config.engine, sleep="auto"))


def _check_all_awake(config: Config) -> Iterator[Problem]:
    """Yield a problem if trainer and engines do not fit together without sleep."""
    is_apart = not uses_engines(config) or config.engine.own_nodes
    if config.hardware.device != "cuda" or is_apart or takes_turns(config):
        return
    fullest = max(phase_memory(config), key=lambda item: item.gpu_gib)
    if fullest.gpu_gib > capacity_gib(config):
        remedy = "set='engine.sleep=auto', or give engines less (engine.mem_fraction_static)"
        yield Problem(
            "awake-engine-exceeds-memory", "engine.sleep", f"never: {_amount(fullest)}", _limit(config), remedy
        )


def _check_transport(config: Config) -> Iterator[Problem]:
    """Yield a problem if updates use SGLang's stock endpoint: all weights pass through rank 0, once for each rank."""
    is_sglang = config.hardware.device == "cuda" and config.engine.kind == "sglang"
    if is_sglang and uses_engines(config) and weight_transport(config) == "tensor":
        seconds = sync_seconds(config, Bandwidths().shared_storage)
        found = f"tensor: {format_seconds(seconds)} for each update, through rank 0"
        yield Problem(
            "slow-transport", "engine.weight_transport", found, "sharded", "set engine.weight_transport=sharded"
        )


def _check_proof(config: Config) -> Iterator[Problem]:
    """Yield a problem if no check verifies that engines compute with the trainer's weights."""
    if uses_engines(config) and not proves_weights(config):
        found = f"{config.hardware.name}: what SGLang makes of weights after loading is not proven"
        remedy = "watch mismatch/abs_diff_mean, which would rise"
        allowed = "CPUs and NVIDIA's Hopper, where it computes with what it loads"
        yield Problem("transport-unproven", "hardware.name", found, allowed, remedy)


def _check_margin(config: Config) -> Iterator[Problem]:
    """Yield the ranks whose memory headroom is below the uncertainty of untracked memory."""
    fullest, limit = max(phase_memory(config), key=lambda item: item.gpu_gib), capacity_gib(config)
    uncertain = uncertainty_gib(config)
    if fullest.gpu_gib <= limit < fullest.gpu_gib + uncertain:
        terms = ", ".join(term.name for term in untracked_terms(config))
        allowed = f"{_limit(config)}; up to {uncertain:.1f} GiB more have been seen of {terms}"
        remedy = "leave room; it may fit, and may not"
        yield Problem("memory-uncertain", "trainer.max_tokens_per_gpu", _amount(fullest), allowed, remedy)


def _check_evaluation_share(config: Config) -> Iterator[Problem]:
    """Yield a problem if evaluations between steps exceed the configured share of training's GPU-hours."""
    interval, most = config.evaluation.interval, config.evaluation.max_share
    # The wait for saves depends on the storage, and only reduces the share.
    seconds = step_durations(config, Bandwidths().shared_storage) if interval else {}
    if not seconds:
        return
    step, measured = seconds["step"], seconds["step_evaluation"]
    share = evaluation_share(step, measured, interval)
    if share > most:
        every = f"{measured:,.0f} s after every {interval * step:,.0f} s"
        remedy = f"evaluation.interval={evaluation_interval(step, measured, most)}, or measure on fewer prompts"
        allowed = f"at most {most:.1%} (evaluation.max_share)"
        found = f"{interval}: {share:.1%} of training's GPU-hours, {every}"
        yield Problem("evaluation-share", "evaluation.interval", found, allowed, remedy)


def _check_node_names(config: Config) -> Iterator[Problem]:
    """Yield a problem if fewer nodes are named than train: the others would get no copy."""
    names = config.site.node_names
    if 0 < len(names) < config.nodes:
        allowed = f"{config.nodes} for as many nodes: the others read from the shared storage"
        remedy = "name every node in the site's file, or none: each node then copies when the job starts"
        yield Problem("node-names-count", "site.node_names", f"{len(names)} names", allowed, remedy)


def _host_gib(config: Config) -> float:
    """Return the maximum host memory of a node, over all phases."""
    return max(host_gib_by_phase(config, [*phase_memory(config), *own_engine_memory(config)]).values())


def _fullest(phases: Sequence[PhaseMemory], names: Sequence[str]) -> PhaseMemory:
    return max((item for item in phases if item.phase in names), key=lambda item: item.gpu_gib)


def _amount(found: PhaseMemory) -> str:
    who = "GPU of an engine" if found.stage == NO_STAGE else f"rank of stage {found.stage}"
    return f"{found.gpu_gib:.1f} GiB per {who} in {found.phase}"


def _limit(config: Config) -> str:
    return f"at most {capacity_gib(config):g} GiB per rank ({config.hardware.name})"

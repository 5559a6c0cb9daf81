"""Memory by phase: on the GPU for a rank of each pipeline stage, and in the host memory of a node.

Trainer and engines share the GPUs, unless engines have their own nodes. The table of `sizing.phases` states which parts
are awake. Host memory has a copy of all trainer parts that sleep; gradients are dropped, and so are engines' weights,
which are sent again with every update, or kept there as last sent (`engine.weight_deltas`). Per phase and rank:

    engine weights    of the engine, and its workspace
    engine cache      KV pool
    trainer           weights; without backward one layer's activations (old_logprobs, mismatch)
    optimizer         gradient buffer, optimizer state (unless offloaded)
    train             saved activations, one recomputed chunk, token copies to and from the experts, a chunk's logits;
                      on NVIDIA's GPUs the maximum of the moments in `activations_cuda`
    always            contexts, communicators and buffers that no tracker sees (`untracked_memory`), memory of kernels
    mismatch          a copy of a layer's own weights during use of the engines' weights, and rounding if it needs more
    weight_sync       two rounds of messages sent, and of those forwarded or received; or a bucket of weights, gathered
                      and in the engines' precision; with deltas, the last update's copy of a tensor and the positions
                      that differ
    while a checkpoint is written, from the end of a step until the end of the next rollout:
                      nothing on the GPU; in host memory one tensor on its way to the file

On a machine without GPUs everything is in host memory. Without colocation all parts are awake. If engines have their
own nodes, ranks hold no engine parts, and the engines' GPUs (`own_engine_memory`) no trainer parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain

from posttrain.config.derived import (
    room_for_engines,
    stage_chunks,
    takes_turns,
    update_bytes_at_once,
    uses_engines,
    weight_transport,
    world_size,
)
from posttrain.config.schema import Config
from posttrain.plan.sizing.activations import MicroBatch, forward_bytes, fullest_micro_batch, stage_activations
from posttrain.plan.sizing.activations_cuda import fullest_moment, kernel_bytes
from posttrain.plan.sizing.assumptions import ASSUMPTIONS, Assumptions
from posttrain.plan.sizing.engine import EngineMemory, engine_memory
from posttrain.plan.sizing.memory import (
    BYTES,
    GIB,
    StageMemory,
    largest_weights,
    served_layer_bytes,
    shards,
    stage_memory,
)
from posttrain.plan.sizing.phases import (
    ASLEEP,
    ENGINE_CACHE,
    ENGINE_WEIGHTS,
    EVERYTHING,
    OPTIMIZER,
    PHASES,
    TRAINER,
    Phase,
)
from posttrain.plan.sizing.routes import engine_routes_bytes
from posttrain.plan.sizing.untracked_memory import untracked_terms
from posttrain_weights import COMPARED_AT_ONCE, RECEIVED_ROUNDS

NO_STAGE = -1
# Master weights and moments: FP32.
STATE_BYTES = 4
# Eight 64-bit numbers per element compared with the last update (`posttrain_weights.delta`).
PLACES_BYTES = 64 * COMPARED_AT_ONCE
# Every other phase holds a subset of one of these; without sleep, a comparison with engines may hold more.
LARGE_PHASES = ("rollout", "train", "weight_sync")
WRITING_PHASES = ("rollout", ASLEEP.name, "save")


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of one rank in one phase, in GiB.

    Args:
        phase: Name of the phase.
        stage: Pipeline stage of the rank; `NO_STAGE` for a GPU with engines only.
        gpu: Memory on the GPU (on a CPU machine: in host memory), by part.
        host: The rank's share of its node's host memory, by part.
    """

    phase: str
    stage: int
    gpu: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def gpu_gib(self) -> float:
        """Total on the GPU."""
        return sum(self.gpu.values())

    @property
    def host_gib(self) -> float:
        """Total in host memory of this rank."""
        return sum(self.host.values())


def phase_memory(
    config: Config,
    assumptions: Assumptions = ASSUMPTIONS,
    batch: MicroBatch | None = None,
    trainer_sleeps: bool = True,
) -> list[PhaseMemory]:
    """Return the memory of a rank of every stage in every phase.

    Args:
        config: The resolved configuration.
        assumptions: Unmeasured figures.
        batch: The largest micro-batch; by default the token budget's limit.
        trainer_sleeps: Whether the trainer releases its memory in phases that do not need it.
    """
    planned = _Plan(config, assumptions, batch or fullest_micro_batch(config, assumptions), engine_memory(config))
    phases = [*PHASES.values(), ASLEEP]
    if not trainer_sleeps:
        phases = [replace(phase, awake=phase.awake | {TRAINER, OPTIMIZER}) for phase in phases]
    return [planned.of(phase, stage) for stage in stage_memory(config) for phase in phases]


def own_engine_memory(config: Config, assumptions: Assumptions = ASSUMPTIONS) -> list[PhaseMemory]:
    """Return the memory of a GPU with engines only, in every phase; empty if they share the trainer's GPUs.

    On a machine without GPUs: the memory of a rank that shares its node's engines with the others.

    Args:
        config: The resolved configuration.
        assumptions: Unmeasured figures.
    """
    if not config.engine.own_nodes:
        return []
    planned = _Plan(config, assumptions, fullest_micro_batch(config, assumptions), engine_memory(config))
    return [planned.of_engines(phase) for phase in PHASES.values()]


def fullest_phase(
    config: Config, stages: list[StageMemory], served: EngineMemory, assumptions: Assumptions
) -> tuple[str, float]:
    """Return the fullest phase, and the GiB of its fullest rank.

    Args:
        config: The resolved configuration.
        stages: Its `stage_memory`.
        served: Its `engine_memory`.
        assumptions: Unmeasured figures.
    """
    planned = _Plan(config, assumptions, fullest_micro_batch(config, assumptions), served)
    fullest, seen = ("", 0.0), set()
    names = LARGE_PHASES if takes_turns(config) else (*LARGE_PHASES, "mismatch")
    for stage in stages:
        kind = (stage.num_layers, stage.weights_bytes)
        # Of equal stages the first holds the most micro-batches; only the last has logits.
        if kind in seen and stage.stage < len(stages) - 1:
            continue
        seen.add(kind)
        for name in names:
            gib = planned.of(PHASES[name], stage).gpu_gib
            fullest = max(fullest, (name, gib), key=lambda found: found[1])
    return fullest


def capacity_gib(config: Config) -> float:
    """Return the memory of a rank: its GPU's, or its share of a node without GPUs."""
    hardware = config.hardware
    share = hardware.gpus_per_node if hardware.device == "cpu" else 1
    return hardware.memory_gib_per_gpu / share


def host_gib_by_phase(config: Config, memory: list[PhaseMemory]) -> dict[str, float]:
    """Return phase -> GiB of host memory of a node whose ranks are all of the fullest stage."""
    is_cpu, ranks = config.hardware.device == "cpu", config.hardware.gpus_per_node
    of_rank: dict[str, float] = {}
    for item in memory:
        gib = item.host_gib + (item.gpu_gib if is_cpu else 0.0)
        of_rank[item.phase] = max(of_rank.get(item.phase, 0.0), gib)
    return {phase: ranks * gib for phase, gib in of_rank.items()}


@dataclass(frozen=True)
class _Plan:
    config: Config
    assumptions: Assumptions
    batch: MicroBatch
    served: EngineMemory

    @property
    def _is_cpu(self) -> bool:
        return self.config.hardware.device == "cpu"

    def of(self, phase: Phase, stage: StageMemory) -> PhaseMemory:
        everything = self._is_cpu
        awake = phase.awake if takes_turns(self.config) and not everything else EVERYTHING
        shared, routes = ({}, (0.0, 0.0)) if self.config.engine.own_nodes else (self._engine(awake), self._routes)
        gpu = {"reserve": self._reserve, **shared, "engine_routes": routes[0]}
        gpu["kernels"] = kernel_bytes(self.config, stage.stage) / GIB
        if TRAINER in awake:
            gpu["weights"] = stage.weights_bytes / GIB
        if OPTIMIZER in awake:
            gpu["gradients"] = stage.gradients_bytes / GIB
            gpu["optimizer"] = 0.0 if stage.optimizer_on_host else stage.optimizer_bytes / GIB
        gpu |= self._work(phase, stage)
        host = {} if everything else {**self._on_host(stage), "engine_routes": routes[1]}
        if self._sends_changes:
            elements = stage.weights_bytes / BYTES[self.config.trainer.params_dtype].weight
            (gpu if everything else host)["sent_weights"] = self._sent_bytes * elements / GIB
        if phase.name in WRITING_PHASES:
            (gpu if everything else host)["save_staging"] = save_staging_bytes(self.config, stage) / GIB
        return PhaseMemory(phase.name, stage.stage, _present(gpu), _present(host))

    def of_engines(self, phase: Phase) -> PhaseMemory:
        """Return the memory of a GPU without a rank, where all parts are awake."""
        on_gpu, on_host = self._routes
        gpu = {"reserve": self._reserve, **self._engine(EVERYTHING), "engine_routes": on_gpu}
        if phase.name == "weight_sync":
            gpu |= self._messages(RECEIVED_ROUNDS if self._is_sharded else 1)
        return PhaseMemory(phase.name, NO_STAGE, _present(gpu), _present({"engine_routes": on_host}))

    @property
    def _sends_changes(self) -> bool:
        return self.config.engine.weight_deltas and uses_engines(self.config)

    @property
    def _sent_bytes(self) -> int:
        """Maximum bytes per number."""
        return 4 if self.config.engine.dtype == "float32" else 2

    @cached_property
    def _reserve(self) -> float:
        if self._is_cpu:
            return self.assumptions.cpu_process
        return sum(term.gib for term in untracked_terms(self.config, self.assumptions))

    @cached_property
    def _routes(self) -> tuple[float, float]:
        """GiB of an engine's routing records, which it keeps during sleep: on the GPU, and on the host."""
        if self._is_cpu or not uses_engines(self.config):
            return 0.0, 0.0
        on_gpu, on_host = engine_routes_bytes(self.config, self.served.kv_tokens_per_gpu)
        return on_gpu / GIB, on_host / GIB

    def _engine(self, awake: frozenset[str]) -> dict[str, float]:
        if ENGINE_WEIGHTS not in awake or not uses_engines(self.config):
            return {}
        weights = self.served.weights_gib_per_gpu
        if self._is_cpu:
            engine, room = self.config.engine, room_for_engines(self.config)
            return {"engine_weights": weights * engine.num_engines * engine.gpus_per_engine / room}
        pool = max(0.0, self.served.kv_gib_per_gpu or 0.0) if ENGINE_CACHE in awake else 0.0
        return {"engine_weights": weights, "kv_pool": pool, "engine_work": self.assumptions.engine_work}

    def _work(self, phase: Phase, stage: StageMemory) -> dict[str, float]:
        config = self.config
        if phase.name == "weight_sync" and uses_engines(config):
            passes_on = self._is_sharded and not config.engine.own_nodes and world_size(config) > 1
            return self._messages(1 + RECEIVED_ROUNDS * passes_on) | self._changes(stage)
        if phase.name not in ("train", "old_logprobs", "mismatch"):
            return {}
        work = self._micro_batch(phase, stage)
        if phase.name == "mismatch":
            beside, rounding = served_layer_bytes(config, stage.stage)
            work["served_layer"] = beside + max(0.0, rounding - sum(work.values()))
        return {**{part: size / GIB for part, size in work.items()}, **self._fragments(sum(work.values()))}

    def _messages(self, times: int) -> dict[str, float]:
        """GiB of two rounds of messages, each `times` a rank's: includes those for the engine on its GPU."""
        return {"sync_bucket": 2 * times * update_bytes_at_once(self.config) / GIB}

    @property
    def _is_sharded(self) -> bool:
        return not self._is_cpu and weight_transport(self.config) == "sharded"

    def _changes(self, stage: StageMemory) -> dict[str, float]:
        if not self._sends_changes:
            return {}
        largest = self._sent_bytes * max(largest_weights(self.config, stage.stage))
        return {"sync_changes": (largest + PLACES_BYTES) / GIB}

    def _micro_batch(self, phase: Phase, stage: StageMemory) -> dict[str, float]:
        config, batch, assumptions = self.config, self.batch, self.assumptions
        if config.hardware.compute_capability:
            return asdict(fullest_moment(config, stage.stage, batch, assumptions, phase.name == "train"))
        chunks = stage_chunks(config)[stage.stage]
        needed = stage_activations(config, stage.stage, chunks, batch, assumptions)
        activations = needed.saved + needed.working
        if phase.name != "train":
            activations = forward_bytes(config, chain(*chunks), batch, assumptions)
        return {"activations": activations, "dispatch": needed.dispatch, "logprobs": needed.logprobs}

    def _fragments(self, work: float) -> dict[str, float]:
        return {} if self._is_cpu else {"fragmentation": self.assumptions.fragmentation * work / GIB}

    def _on_host(self, stage: StageMemory) -> dict[str, float]:
        optimizer = stage.optimizer_bytes / GIB
        if stage.optimizer_on_host:
            host = {"offloaded_optimizer": optimizer}
        else:
            host = {"sleeping_optimizer": optimizer} if takes_turns(self.config) else {}
        return host | ({"sleeping_weights": stage.weights_bytes / GIB} if takes_turns(self.config) else {})


def save_staging_bytes(config: Config, stage: StageMemory) -> int:
    """Return the host memory that a save needs on one rank: its largest tensor, weight or optimizer state.

    A rank writes whole weights, and the part of the state in its shard of the buffer.

    Args:
        config: The resolved configuration.
        stage: Persistent memory of a rank of the stage.

    Example:
        GLM-5 on 16 nodes: 0.77 GiB on the first stage, for the embedding; 0.09 in the middle, for a projection.
    """
    weight_bytes = BYTES[config.trainer.params_dtype].weight
    buffers = (stage.dense_elements, stage.expert_elements)
    return max(
        max(weight_bytes * elements, STATE_BYTES * min(elements, buffer // parts))
        for elements, buffer, parts in zip(largest_weights(config, stage.stage), buffers, shards(config), strict=True)
    )


def _present(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: gib for part, gib in parts.items() if gib > 0}

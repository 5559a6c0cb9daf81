"""Layouts of the trainer for any number of nodes: validity, fit and order.

All products of possibly valid sizes are tried: TP within a node, even if links join nodes, because a job may get nodes
without such links; PP up to the number of layers, with the smallest possible largest stage; CP in powers of two up to
16 (each rank takes two chunks of a sequence); EP a divisor of the experts; ETP 1, or TP if the rules require it.
`config.rules.check_consistency` validates each.

Order: layouts that fit with headroom, then those that fit, then the rest; ties are ordered by the time of an update
(`layout_cost`), then by sizes. "Fits" covers every phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.config.derived import data_parallel_size, layers_per_stage, world_size
from posttrain.config.layout_rules import LAYOUT_RULES
from posttrain.config.schema import Config, Parallel
from posttrain.errors import Problem
from posttrain.plan.sizing.activations import fullest_micro_batch
from posttrain.plan.sizing.assumptions import ASSUMPTIONS, Assumptions
from posttrain.plan.sizing.engine import EngineMemory, engine_memory
from posttrain.plan.sizing.layout_cost import Cost, layout_cost
from posttrain.plan.sizing.memory import iterate_stages, stage_memory
from posttrain.plan.sizing.memory_phases import capacity_gib, fullest_phase

# Largest context-parallel size that is tried: a rank then has 2,048 tokens of a response of 32,768.
LARGEST_CONTEXT = 16


@dataclass(frozen=True)
class LayoutProposal:
    """One valid layout.

    Args:
        parallel: Parallel sizes.
        layers_per_stage: Decoder layers of each stage.
        data_parallel_size: Number of ranks with different samples.
        held_gib: Weights, gradients and optimizer state of the fullest rank, without estimates.
        peak_gib: Memory of the fullest rank in the fullest phase.
        peak_phase: The fullest phase.
        capacity_gib: Memory of a rank.
        fits: The peak is below the capacity.
        has_headroom: The peak also leaves the required share free.
        cost: Cost of an update.
    """

    parallel: Parallel
    layers_per_stage: tuple[int, ...]
    data_parallel_size: int
    held_gib: float
    peak_gib: float
    peak_phase: str
    capacity_gib: float
    fits: bool
    has_headroom: bool
    cost: Cost

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by their keys in the section `parallel`."""
        return dataclasses.asdict(self.parallel)

    def reasons(self) -> str:
        """Return the reasons for its position in the order."""
        free = self.capacity_gib - self.peak_gib
        room = (
            f"{free:.1f} GiB free in {self.peak_phase}"
            if self.fits
            else f"{-free:.1f} GiB too much in {self.peak_phase}"
        )
        idle, sent = self.cost.idle_fraction, self.cost.communication_fraction
        return f"{room}; {idle:.0%} of a pipeline idle; {sent:.0%} of an update in communication"

    def as_dict(self) -> dict[str, Any]:
        """Return the proposal's entry in `plan.json`."""
        return {
            **self.sizes,
            "layers_per_stage": list(self.layers_per_stage),
            "data_parallel_size": self.data_parallel_size,
            "peak_gib": round(self.peak_gib, 2),
            "peak_phase": self.peak_phase,
            "fits": self.fits,
            "has_headroom": self.has_headroom,
            "num_micro_batches": self.cost.num_micro_batches,
            "relative_seconds": float(f"{self.cost.seconds:.4g}"),
            "reasons": self.reasons(),
        }


def propose_layouts(config: Config, pinned: Mapping[str, int] | None = None) -> list[LayoutProposal]:
    """Return every valid layout for a configuration's number of nodes, best first.

    Args:
        config: A configuration; its own layout is ignored.
        pinned: Fixed sizes, by their keys in the section `parallel`.
    """
    served = engine_memory(config)
    valid = (variant for variant in _variants(config, pinned or {}) if _is_valid(variant))
    return sorted((assess_layout(variant, served) for variant in valid), key=_rank)


def best_fitting_layout(config: Config, pinned: Mapping[str, int] | None = None) -> LayoutProposal | None:
    """Return the first of `propose_layouts` if it fits; faster, because it computes phases only as needed.

    Args:
        config: A configuration; its own layout is ignored.
        pinned: Fixed sizes, by their keys in the section `parallel`.
    """
    served, capacity, found = engine_memory(config), capacity_gib(config), []
    costs: list[tuple[float, tuple[int, ...], Config]] = []
    for variant in filter(_is_valid, _variants(config, pinned or {})):
        stages = stage_memory(variant)
        if all(stage.total_gib <= capacity for stage in stages):
            cost = layout_cost(variant, stages, fullest_micro_batch(variant, ASSUMPTIONS))
            costs.append((cost.seconds, dataclasses.astuple(variant.parallel), variant))
    for *_, variant in sorted(costs, key=lambda item: item[:2]):
        proposal = assess_layout(variant, served)
        if proposal.has_headroom:
            return proposal
        if proposal.fits:
            found.append(proposal)
    return min(found, key=_rank, default=None)


def assess_layout(config: Config, served: EngineMemory, assumptions: Assumptions = ASSUMPTIONS) -> LayoutProposal:
    """Return the configured layout with its memory and cost.

    Args:
        config: The configuration.
        served: Its `engine_memory`, which does not depend on the trainer's layout.
        assumptions: Unmeasured figures.
    """
    stages, batch, capacity = stage_memory(config), fullest_micro_batch(config, assumptions), capacity_gib(config)
    phase, peak = fullest_phase(config, stages, served, assumptions)
    return LayoutProposal(
        parallel=config.parallel,
        layers_per_stage=tuple(layers_per_stage(config)),
        data_parallel_size=data_parallel_size(config),
        held_gib=max(stage.total_gib for stage in stages),
        peak_gib=peak,
        peak_phase=phase,
        capacity_gib=capacity,
        fits=peak <= capacity,
        has_headroom=peak <= capacity * (1 - assumptions.headroom),
        cost=layout_cost(config, stages, batch),
    )


def layout_problems(config: Config) -> Iterator[Problem]:
    """Yield the rules that a configuration's layout violates."""
    return (problem for rule in LAYOUT_RULES for problem in rule(config))


def _is_valid(config: Config) -> bool:
    return next(layout_problems(config), None) is None


def some_layout_fits(config: Config, pinned: Mapping[str, int] | None = None) -> bool:
    """Return whether any layout of `propose_layouts` fits, without ranking the others."""
    capacity, served = capacity_gib(config), None
    for variant in _variants(config, pinned or {}):
        is_held = all(stage.total_gib <= capacity for stage in iterate_stages(variant))
        if is_held and _is_valid(variant):
            served = served or engine_memory(config)
            if assess_layout(variant, served).fits:
                return True
    return False


def some_layout_is_valid(config: Config, pinned: Mapping[str, int] | None = None) -> bool:
    """Return whether `propose_layouts` returns any layout."""
    return any(map(_is_valid, _variants(config, pinned or {})))


def nearly_valid(config: Config, pinned: Mapping[str, int] | None = None) -> Config:
    """Return the configuration with the layout that violates the fewest rules."""
    variants = _variants(config, pinned or {}, any_batch=True)
    return min(variants, key=lambda variant: len([*layout_problems(variant)]), default=config)


def _rank(proposal: LayoutProposal) -> tuple[Any, ...]:
    # If nothing fits, the smallest excess comes first.
    excess = 0.0 if proposal.fits else round(proposal.peak_gib - proposal.capacity_gib, 3)
    sizes = tuple(proposal.sizes.values())
    return not proposal.has_headroom, not proposal.fits, excess, proposal.cost.seconds, sizes


def _variants(config: Config, pinned: Mapping[str, int], any_batch: bool = False) -> Iterator[Config]:
    """Yield the configuration with every layout whose sizes satisfy the divisibility rules."""
    ranks, batch = world_size(config), config.training.global_batch_size
    # Interleaving is used only on request: its cost in messages is unknown without a measurement.
    chunks = pinned.get("virtual_pipeline_model_parallel_size", 1)
    for tensor, pipeline, context in _dense_sizes(config, pinned):
        if not any_batch and batch % (ranks // (tensor * pipeline * context)):
            continue
        first = pinned.get("num_layers_in_first_pipeline_stage", 0) if pipeline > 1 else 0
        last = _pinned_or(pinned, "num_layers_in_last_pipeline_stage", [_last_stage(config, pipeline, first)])
        for expert, expert_tensor in _expert_sizes(config, pinned, tensor, ranks // pipeline):
            for layers in last:
                parallel = Parallel(tensor, pipeline, context, expert, expert_tensor, layers, chunks, first)
                yield dataclasses.replace(config, parallel=parallel)


def _dense_sizes(config: Config, pinned: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    ranks, num_layers = world_size(config), config.model.architecture.num_hidden_layers
    in_node = _divisors_up_to(ranks, config.hardware.gpus_per_node)
    powers = [1 << exponent for exponent in range(LARGEST_CONTEXT.bit_length())]
    for tensor in _pinned_or(pinned, "tensor_model_parallel_size", in_node):
        for pipeline in _pinned_or(pinned, "pipeline_model_parallel_size", _divisors_up_to(ranks, num_layers)):
            for context in _pinned_or(pinned, "context_parallel_size", powers):
                if ranks % (tensor * pipeline * context) == 0:
                    yield tensor, pipeline, context


def _expert_sizes(
    config: Config, pinned: Mapping[str, int], tensor: int, stage_ranks: int
) -> Iterator[tuple[int, int]]:
    experts = config.model.architecture.n_routed_experts
    for expert in _pinned_or(pinned, "expert_model_parallel_size", _divisors_up_to(experts, experts) or [1]):
        needed = tensor if expert == 1 and experts else 1
        for expert_tensor in _pinned_or(pinned, "expert_tensor_parallel_size", [needed]):
            if stage_ranks % (expert * expert_tensor) == 0:
                yield expert, expert_tensor


def _last_stage(config: Config, stages: int, first: int = 0) -> int:
    """Return the number of layers in the last stage that minimises the largest stage; 0 for an even split.

    Example:
        78 layers on 4 stages: 18, after three stages of 20.

    Args:
        config: Has the number of layers.
        stages: Number of stages.
        first: Layers of the first stage; 0: as the others.
    """
    num_layers, stages = config.model.architecture.num_hidden_layers - first, stages - (first > 0)
    if stages == 1 or num_layers % stages == 0:
        return 0
    cuts = {num_layers - (stages - 1) * each: each for each in range(1, num_layers // (stages - 1) + 1)}
    possible = [(max(last, each), last) for last, each in cuts.items() if last >= 1]
    # Without a possible split: even, which the rules reject.
    return min(possible, default=(0, 0))[1]


def _pinned_or(pinned: Mapping[str, int], key: str, others: Sequence[int]) -> Sequence[int]:
    return [pinned[key]] if key in pinned else others


@lru_cache(maxsize=1024)
def _divisors_up_to(number: int, largest: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, largest) + 1) if number % size == 0)

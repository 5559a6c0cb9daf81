"""What shortens a step and costs memory, chosen together: recomputation, offload, the cut of rows, interleaving.

With `trainer.recompute_granularity=auto` each of these that no file and no `set=` gives is searched:

    recomputation    nothing; each set of the modules that can be recomputed; so many layers of each chunk; all layers;
                     of layers with or without the indexer's choice of keys
    offload          optimizer state in host memory frees most of a rank's memory, for seconds per update
    context (CP)     the sizes that the layout's rules allow: twice the ranks share a row of twice the length
    tokens           halved budgets of a rank, while a row still has room for a response: rows no longer than before,
                     shared by more ranks, keep less
    chunks (VPP)     of the layers of a stage: the pipeline idles for less, and keeps more

A candidate is as fast as the step-time model says (`plan.timing`), and fits if every phase leaves headroom. Of those
that are nearly as fast as the fastest, the one that changes least is taken. On a machine without GPUs no time is
modelled: nothing is recomputed where that fits, otherwise everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, islice, product
from typing import Any

from posttrain.config.derived import recomputable_modules, stage_chunks
from posttrain.config.families import family_of
from posttrain.config.load import PLANNER, Chosen
from posttrain.config.rules import check_consistency
from posttrain.config.schema import Config, Trainer
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.engine import EngineMemory, engine_memory
from posttrain.plan.sizing.layout import LARGEST_CONTEXT, layout_problems
from posttrain.plan.sizing.memory import stage_memory
from posttrain.plan.sizing.memory_phases import capacity_gib, fullest_phase, host_gib_by_phase, phase_memory
from posttrain.plan.timing.step_time import training_seconds

GRANULARITY, METHOD = "trainer.recompute_granularity", "trainer.recompute_method"
LAYERS, MODULES, KEPT = "trainer.recompute_num_layers", "trainer.recompute_modules", "trainer.keep_index_choice"
OFFLOAD, CONTEXT, TOKENS, CHUNKS = (
    "trainer.optimizer_cpu_offload",
    "parallel.context_parallel_size",
    "trainer.max_tokens_per_gpu",
    "parallel.virtual_pipeline_model_parallel_size",
)
KEYS = (GRANULARITY, METHOD, LAYERS, MODULES, KEPT, OFFLOAD, CONTEXT, TOKENS, CHUNKS)
AUTO = "auto"
# Times are predicted; a gain below this share of training is not worth another setting.
NEARLY = 0.01
SHOWN = 6

# Values of `KEYS` that a candidate sets.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Args:
        values: Dotted key -> value, of the keys that are searched.
        config: The configuration with them.
        seconds: Log-probabilities and training of a step; 0 on a machine without GPUs.
        served: `engine_memory` of it.
    """

    values: Values
    config: Config
    seconds: float
    served: EngineMemory

    @cached_property
    def fullest(self) -> tuple[str, float]:
        """The fullest phase, and the GiB of its fullest rank."""
        return fullest_phase(self.config, stage_memory(self.config), self.served, ASSUMPTIONS)

    @property
    def fits(self) -> bool:
        """Return whether each rank keeps headroom, and each node has the host memory for what is offloaded."""
        if self.fullest[1] > capacity_gib(self.config) * (1 - ASSUMPTIONS.headroom):
            return False
        hardware = self.config.hardware
        if not self.config.trainer.optimizer_cpu_offload or not hardware.host_memory_gib:
            return True
        return max(host_gib_by_phase(self.config, phase_memory(self.config)).values()) <= hardware.host_memory_gib

    @property
    def num_changes(self) -> tuple[int, ...]:
        """How far it is from the plainest: offload, chunks, ranks and tokens of a row, modules to recompute."""
        trainer, parallel = self.config.trainer, self.config.parallel
        cut = parallel.context_parallel_size, -trainer.max_tokens_per_gpu
        again = len(trainer.recompute_modules) + (trainer.keep_index_choice == "all")
        return trainer.optimizer_cpu_offload, parallel.virtual_pipeline_model_parallel_size, *cut, again

    def as_dict(self, is_chosen: bool) -> dict[str, Any]:
        """Return the candidate as it stands in `plan.json`."""
        phase, gib = self.fullest
        return {
            "recomputation": recomputation_in_words(self.config),
            "optimizer_cpu_offload": self.config.trainer.optimizer_cpu_offload,
            "context_parallel_size": self.config.parallel.context_parallel_size,
            "max_tokens_per_gpu": self.config.trainer.max_tokens_per_gpu,
            "virtual_pipeline_model_parallel_size": self.config.parallel.virtual_pipeline_model_parallel_size,
            "seconds": round(self.seconds, 3),
            "peak_gib": round(gib, 2),
            "peak_phase": phase,
            "fits": self.fits,
            "is_chosen": is_chosen,
        }


def choose_step(config: Config, origins: Mapping[str, str]) -> Chosen:
    """Return what the search takes; nothing where recomputation is not `auto`, or where a rule is violated anyway.

    Args:
        config: The configuration with its layout.
        origins: Which keys a layer has set: those stay.
    """
    if config.trainer.recompute_granularity != AUTO or check_consistency(config):
        return Chosen({})
    best, given = _best(candidates(config, _searched(origins))), _values_of(config)
    return Chosen({key: value for key, value in best.values.items() if value != given[key]})


def step_choice_part(config: Config, origins: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the fastest candidates and the chosen one as they stand in `plan.json`; none where nothing was searched.

    Args:
        config: The resolved configuration.
        origins: Which layer set each key.
    """
    if config.hardware.device == "cpu" or origins.get(GRANULARITY) != PLANNER:
        return []
    found, chosen = candidates(config, _searched(origins)), _values_of(config)
    shown = [
        *islice((each for each in found if not each.fits), 2),
        *islice((each for each in found if each.fits), SHOWN),
    ]
    shown += [_plainest(found), *(each for each in found if each.values == chosen)]
    unique = sorted({id(each): each for each in shown}.values(), key=lambda each: each.seconds)
    return [each.as_dict(each.values == chosen) for each in unique]


def _searched(origins: Mapping[str, str]) -> set[str]:
    """Return the keys that no file and no `set=` gives; how much is recomputed was left to the planner."""
    return {GRANULARITY, *(key for key in KEYS if origins.get(key, PLANNER) == PLANNER)}


def candidates(config: Config, free: set[str]) -> list[Candidate]:
    """Return the valid combinations of the searched keys, the fastest first.

    Left out are layouts that cannot come near one that fits, but for the plainest.

    Args:
        config: The configuration.
        free: Which of `KEYS` may change.
    """
    layouts, served = [*_layouts(config, free)], engine_memory(config)
    found, most = [], math.inf
    for bound, layout in sorted(((_least_seconds(each), each) for each in layouts), key=lambda each: each[0]):
        if bound <= most or layout is layouts[0]:
            of_layout = sorted(_of_layout(layout, free, served), key=lambda each: each.seconds)
            fastest = next((each.seconds for each in of_layout if each.seconds <= most and each.fits), math.inf)
            most = min(most, fastest * (1 + NEARLY))
            found += of_layout
    return sorted(found, key=lambda each: each.seconds)


def _of_layout(layout: Config, free: set[str], served: EngineMemory) -> Iterator[Candidate]:
    is_cpu = layout.hardware.device == "cpu"
    is_free = OFFLOAD in free and not is_cpu and layout.trainer.params_dtype == "bf16"
    is_free = is_free and not family_of(layout.model.architecture).fp32_names
    offloads = (False, True) if is_free else (layout.trainer.optimizer_cpu_offload,)
    for offload, recomputation in product(offloads, _recomputations(layout, free)):
        trainer = dataclasses.replace(layout.trainer, optimizer_cpu_offload=offload, **recomputation)
        variant = dataclasses.replace(layout, trainer=trainer)
        yield Candidate(_values_of(variant), variant, 0.0 if is_cpu else training_seconds(variant), served)


def _least_seconds(layout: Config) -> float:
    """Return how long a layout takes at least: nothing is computed again, and nothing is on the host."""
    if layout.hardware.device == "cpu":
        return 0.0
    least: dict[str, Any] = {"recompute_granularity": "none", "recompute_modules": [], "optimizer_cpu_offload": False}
    return training_seconds(dataclasses.replace(layout, trainer=dataclasses.replace(layout.trainer, **least)))


def recomputation_in_words(config: Config) -> str:
    """Return what is computed again.

    Example:
        "layernorm, mla_up_proj, moe"; "2 layers of each chunk"; "all layers"; "all layers, keys kept"; "nothing".
    """
    trainer = config.trainer
    if trainer.recompute_granularity == "selective":
        return ", ".join(trainer.recompute_modules)
    if trainer.recompute_granularity == "none":
        return "nothing"
    layers = f"{trainer.recompute_num_layers} layers of each chunk"
    kept = ", keys kept" if trainer.keep_index_choice == "all" else ""
    return f"{'all layers' if trainer.recompute_method == 'uniform' else layers}{kept}"


def _best(found: list[Candidate]) -> Candidate:
    """Return the plainest that fits and is nearly as fast as the fastest; if none fits, the plainest of the leanest."""
    fitting = (each for each in found if each.fits)
    fastest = next(fitting, None)
    if fastest is None:
        leanest = min(each.fullest[1] for each in found)  # equal for all where engines alone are too large
        return _plainest([each for each in found if each.fullest[1] == leanest])
    if not fastest.seconds:  # of equal ones the first is the one that recomputes least
        return fastest
    most = fastest.seconds * (1 + NEARLY)
    near = [each for each in found if fastest.seconds <= each.seconds <= most]
    return min((each for each in near if each.fits), key=lambda each: (each.num_changes, each.seconds))


def _plainest(found: list[Candidate]) -> Candidate:
    """Return the one that recomputes all layers and nothing else: what is done without a search."""
    full = [each for each in found if recomputation_in_words(each.config) == "all layers"]
    return min(full or found, key=lambda each: (not each.fits, each.num_changes))


def _layouts(config: Config, free: set[str]) -> Iterator[Config]:
    """Yield the configuration with each context parallelism and number of chunks that is free and valid."""
    parallel = config.parallel
    contexts = [1 << power for power in range(LARGEST_CONTEXT.bit_length())] if CONTEXT in free else []
    contexts = contexts or [parallel.context_parallel_size]
    layers = max(map(len, chain(*stage_chunks(config)))) * parallel.virtual_pipeline_model_parallel_size
    is_staged = parallel.pipeline_model_parallel_size > 1 and config.hardware.device != "cpu"
    counts = range(1, layers + 1) if CHUNKS in free and is_staged else [parallel.virtual_pipeline_model_parallel_size]
    for context, count in product(contexts, counts):
        sizes = {"context_parallel_size": context, "virtual_pipeline_model_parallel_size": count}
        for tokens in _budgets(config, context) if {CONTEXT, TOKENS} <= free else [config.trainer.max_tokens_per_gpu]:
            trainer = dataclasses.replace(config.trainer, max_tokens_per_gpu=tokens)
            variant = dataclasses.replace(config, parallel=dataclasses.replace(parallel, **sizes), trainer=trainer)
            if variant == config or not any(layout_problems(variant)):
                yield variant


def _budgets(config: Config, context: int) -> list[int]:
    """Return the default token budget of a rank, and its halves that still give a response a row."""
    halves = (Trainer.max_tokens_per_gpu >> power for power in range(LARGEST_CONTEXT.bit_length()))
    return [
        tokens
        for tokens in halves
        if tokens == Trainer.max_tokens_per_gpu or tokens * context >= config.rollout.max_response_tokens
    ]


def _recomputations(config: Config, free: set[str]) -> list[dict[str, Any]]:
    """Return each way to recompute as values of `trainer`, the least first."""
    least = min(map(len, chain(*stage_chunks(config))))
    full = {"recompute_granularity": "full", "recompute_modules": []}
    arch = config.model.architecture
    kept = [{"keep_index_choice": kept} for kept in ("none", "all")]
    kept = kept[: 1 + (arch.index_n_heads > 0 and arch.index_topk_freq == 1)] if KEPT in free else [{}]
    if GRANULARITY not in free:
        return [{}]
    if METHOD not in free or LAYERS not in free:  # keys of full recomputation
        return [{**full, **keys} for keys in kept]
    nothing = {**full, "recompute_granularity": "none", "recompute_method": "uniform", "recompute_num_layers": 1}
    everything = {**nothing, "recompute_granularity": "full"}
    if config.hardware.device == "cpu":
        return [nothing, everything]
    modules = [
        {**nothing, "recompute_granularity": "selective", "recompute_modules": [*names]} for names in _sets(config)
    ]
    layers = [{**everything, "recompute_method": "block", "recompute_num_layers": count} for count in range(1, least)]
    again = [{**ways, **keys} for ways in (*layers, everything) for keys in kept]
    return [*({**ways, **kept[0]} for ways in (nothing, *modules)), *again]


def _sets(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield the sets of modules that can be recomputed, without those inside others."""
    possible = recomputable_modules(config)
    for names in chain.from_iterable(combinations(possible, size) for size in range(1, len(possible) + 1)):
        if "moe" not in names or not {"moe_act", "shared_experts"} & {*names}:
            yield names


def _values_of(config: Config) -> dict[str, Any]:
    return {key: getattr(getattr(config, section), name) for key in KEYS for section, _, name in [key.partition(".")]}

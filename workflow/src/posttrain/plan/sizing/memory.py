"""Persistent memory of each trainer rank: weights, gradient buffer, optimizer state.

Per parameter, under Megatron's distributed optimizer:

    bf16   weight 2 B   gradient 4 B (accumulated in FP32)   FP32 master copy, first and second moment 12 B / shards
    fp32   weight 4 B   gradient 4 B                         first and second moment 8 B / shards
                                                             (the weight is its own master copy)

Tensor parallelism (TP) splits weights with heads, dense and shared MLPs, embedding and output matrix; latent
projections, norms, router and indexer are replicated. Expert parallelism (EP) distributes the experts, expert tensor
parallelism (ETP) splits each. The optimizer's state of a dense weight is sharded over the ranks with the same piece:
world / (TP PP); of an expert's weight over world / (EP ETP PP).

Trained weights and gradients have one buffer each, separately for dense weights and experts. Tensors start at multiples
of 64 elements and the buffer ends at a multiple of lcm(shards, 128). The indexer is frozen (`glm5/indexer.py`) and the
router's bias is not a parameter: neither has gradients or optimizer state.

Source: megatron-core 0.19.2, `core/distributed/param_and_grad_buffer.py` (buffers and their padding),
`core/optimizer/distrib_optimizer.py` (shards), `core/optimizer/cpu_offloading/hybrid_optimizer.py` (offload).
`activations` has the memory that depends on tokens, `memory_phases` the memory of each phase.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from posttrain.config.derived import stage_chunks, uses_engines, world_size
from posttrain.config.schema import Architecture, Config
from posttrain.plan.sizing.model_size import Weight, decoder_weights, edge_weights

GIB = 1 << 30
# Alignment of tensors and of the buffer's end, in elements; see the module's docstring.
PARAMETER_ALIGNMENT = 64
BUFFER_ALIGNMENT = 128
# The router's bias, and Megatron's count of tokens per expert.
ROUTER_BUFFER_BYTES = 4 + 4
# An offloaded shard: FP32 master copy, two moments, and the pinned copy of the gradient for the CPU's Adam.
OFFLOADED_BYTES = 12 + 4
# Bytes of a weight during quantisation: FP32, the scaled value, and two copies of the codes.
ROUNDING_BYTES = 4 + 4 + 1 + 1
NOT_MODELLED = (
    "trainer memory: fragmentation beyond the stated reserve; rows of very unequal sequences, which attention pads to "
    "the longest; while weights are sent, a whole tensor in BF16 and FP32",
)


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes of one parameter on a rank; `optimizer` is divided by the number of shards."""

    weight: int
    gradient: int
    optimizer: int


BYTES = {"bf16": BytesPerParameter(2, 4, 12), "fp32": BytesPerParameter(4, 4, 8)}


@dataclass(frozen=True)
class StageMemory:
    """Persistent memory of one rank of a pipeline stage.

    Args:
        stage: Index of the stage, from 0.
        num_layers: Decoder layers in it.
        parameters_per_rank: Parameters on one rank.
        weights_bytes: Size of its weights, including padding and router buffers.
        gradients_bytes: Size of the gradient buffer.
        optimizer_bytes: Optimizer state of this rank, on the GPU or offloaded to the host.
        optimizer_on_host: Whether the optimizer's state is offloaded.
        dense_elements: Length of the buffer of trained elements outside experts, including padding.
        expert_elements: Length of the experts' buffer.
    """

    stage: int
    num_layers: int
    parameters_per_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_on_host: bool
    dense_elements: int
    expert_elements: int

    @property
    def total_gib(self) -> float:
        """GiB on the GPU (on a CPU machine: in host memory)."""
        optimizer = 0 if self.optimizer_on_host else self.optimizer_bytes
        return (self.weights_bytes + self.gradients_bytes + optimizer) / GIB

    def as_dict(self) -> dict[str, float]:
        """Return the stage's entry in `plan.json`."""
        return {**asdict(self), "total_gib": round(self.total_gib, 4)}


def stage_memory(config: Config) -> list[StageMemory]:
    """Return the persistent memory of a rank of each pipeline stage.

    Example:
        GLM-5 on 16 nodes (TP4 PP4 CP2 EP32, [20, 20, 20, 18] layers): 110.59 GiB in the middle stages.
    """
    return list(iterate_stages(config))


def iterate_stages(config: Config) -> Iterator[StageMemory]:
    """Yield the stages of `stage_memory`, so that a caller can stop at the first one that does not fit."""
    cuts = _cuts(config)
    for stage, chunks in enumerate(_with_edges(config)):
        elements = [_chunk_elements(config.model.architecture, cuts, *chunk) for chunk in chunks]
        yield _memory_of(config, stage, sum(len(layers) for layers, *_ in chunks), elements)


def _with_edges(config: Config) -> list[list[tuple[range, bool, bool]]]:
    """Return each stage's chunks of layers, with flags for the model's first and last chunk."""
    stages = stage_chunks(config)
    first, last = stages[0][0], stages[-1][-1]
    return [[(layers, layers is first, layers is last) for layers in chunks] for chunks in stages]


def shards(config: Config) -> tuple[int, int]:
    """Return the number of ranks that shard the optimizer's state of a dense weight and of an expert's."""
    parallel = config.parallel
    stage_ranks = world_size(config) // parallel.pipeline_model_parallel_size
    expert_size = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    return stage_ranks // parallel.tensor_model_parallel_size, stage_ranks // expert_size


def largest_weights(config: Config, stage: int) -> tuple[int, int]:
    """Return the elements of the largest dense tensor and of the largest expert tensor on a rank of a pipeline stage.

    Tensor-wise operations need memory for one: its gradient besides the buffer, or its copy on the way to a file.
    """
    parallel = config.parallel
    cuts = (parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size, 1)
    found = [_largest_weights(config.model.architecture, cuts, *chunk) for chunk in _with_edges(config)[stage]]
    return max(dense for dense, _ in found), max(expert for _, expert in found)


def served_layer_bytes(config: Config, stage: int) -> tuple[int, int]:
    """Return the memory to compute with the engines' weights: (copy of a layer's own ones, rounding of one).

    Args:
        config: The resolved configuration.
        stage: Pipeline stage of the rank.

    Example:
        GLM-5 on 16 nodes: 0.70 GiB for the copy of 8 experts and attention, and 0.23 GiB for rounding a projection.
    """
    trainer, is_fp8 = config.trainer, config.rollout.fp8
    if not uses_engines(config) or not trainer.mismatch_interval or (trainer.params_dtype == "bf16" and not is_fp8):
        return 0, 0
    cuts, chunks = _cuts(config), _with_edges(config)[stage]
    found = [_lent_elements(config.model.architecture, cuts, trainer.params_dtype == "fp32", *c) for c in chunks]
    rounding = ROUNDING_BYTES * max(largest_weights(config, stage)[1], *(largest for _, _, largest in found))
    layer, edges = max(layer for layer, _, _ in found), sum(edges for _, edges, _ in found)
    return BYTES[trainer.params_dtype].weight * (layer + edges), rounding * is_fp8


@lru_cache(maxsize=4096)
def _lent_elements(
    arch: Architecture, cuts: tuple[int, int, int], is_all: bool, layers: range, is_first: bool, is_last: bool
) -> tuple[int, int, int]:
    """Return the changed elements: maximum per layer, of the edges, and of the largest changed matrix."""
    kinds, kind_of = layer_kinds(arch)
    parts = dict(zip(("tensor", "expert", "none"), cuts, strict=True))
    changing = [[w for w in kinds[kind] if w.fp8 or is_all] for kind in {*kind_of[layers.start : layers.stop]}]
    first, last = edge_weights(arch, num_stages=1 if is_first and is_last else 2)
    edges = [*(first if is_first and is_all else ()), *(last if is_last and is_all else ())]
    dense = [math.prod(w.shape) // parts[w.split] for layer in changing for w in layer if w.split != "expert"]
    return (
        max(sum(w.num_elements // parts[w.split] for w in layer) for layer in changing),
        sum(w.num_elements // parts[w.split] for w in edges),
        max(dense, default=0),
    )


@lru_cache(maxsize=4096)
def _largest_weights(
    arch: Architecture, cuts: tuple[int, int, int], layers: range, is_first: bool, is_last: bool
) -> tuple[int, int]:
    kinds, kind_of = layer_kinds(arch)
    first, last = edge_weights(arch)
    there = [*(first if is_first else ()), *(last if is_last else ())]
    for kind in set(kind_of[layers.start : layers.stop]):
        there += kinds[kind]
    parts, largest = dict(zip(("tensor", "expert", "none"), cuts, strict=True)), {True: 0, False: 0}
    for weight in there:
        is_expert = weight.split == "expert"
        largest[is_expert] = max(largest[is_expert], math.prod(weight.shape) // parts[weight.split])
    return largest[False], largest[True]


def _cuts(config: Config) -> tuple[int, int, int]:
    """Return the number of pieces for the splits "tensor", "expert" and "none"."""
    parallel = config.parallel
    expert_size = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    return parallel.tensor_model_parallel_size, expert_size, 1


def _memory_of(config: Config, stage: int, num_layers: int, of_chunks: Sequence[Mapping[str, int]]) -> StageMemory:
    cost, offloaded = BYTES[config.trainer.params_dtype], config.trainer.optimizer_cpu_offload
    dense_shards, expert_shards = shards(config)
    frozen, buffers, parameters = (
        sum(chunk[part] for chunk in of_chunks) for part in ("frozen", "buffers", "parameters")
    )
    # Each chunk has its own buffers.
    dense = sum(_round_up(chunk["dense"], math.lcm(dense_shards, BUFFER_ALIGNMENT)) for chunk in of_chunks)
    expert = sum(_round_up(chunk["expert"], math.lcm(expert_shards, BUFFER_ALIGNMENT)) for chunk in of_chunks)
    in_shards = dense // dense_shards + expert // expert_shards
    weights = (dense + expert + frozen) * cost.weight + buffers * ROUTER_BUFFER_BYTES
    return StageMemory(
        stage=stage,
        num_layers=num_layers,
        parameters_per_rank=parameters,
        weights_bytes=weights,
        gradients_bytes=(dense + expert) * cost.gradient,
        optimizer_bytes=in_shards * (OFFLOADED_BYTES if offloaded else cost.optimizer),
        optimizer_on_host=offloaded,
        dense_elements=dense,
        expert_elements=expert,
    )


@lru_cache(maxsize=64)
def layer_kinds(arch: Architecture) -> tuple[tuple[tuple[Weight, ...], ...], tuple[int, ...]]:
    """Return the distinct layers of a model, usually two or three, and the index into them for each layer."""
    layers = decoder_weights(arch)
    kinds = tuple(dict.fromkeys(layers))
    return kinds, tuple(kinds.index(layer) for layer in layers)


@lru_cache(maxsize=4096)
def _chunk_elements(
    arch: Architecture, cuts: tuple[int, int, int], layers: range, is_first: bool, is_last: bool
) -> Counter[str]:
    """Return the dense, expert, frozen and buffer elements and the parameters of a rank's chunk."""
    kinds, kind_of = layer_kinds(arch)
    elements: Counter[str] = Counter(dict.fromkeys(("dense", "expert", "frozen", "buffers", "parameters"), 0))
    for kind, repeats in Counter(kind_of[layers.start : layers.stop]).items():
        of_layer = _elements(kinds[kind], cuts)
        elements.update({part: repeats * number for part, number in of_layer.items()})
    # A tied embedding exists once on a chunk that is first and last, otherwise on both ends.
    first, last = edge_weights(arch, num_stages=1 if is_first and is_last else 2)
    for is_there, weights in ((is_first, first), (is_last, last)):
        if is_there:
            elements.update(_elements(weights, cuts))
    return elements


def _elements(weights: Iterable[Weight], cuts: tuple[int, int, int]) -> Counter[str]:
    parts = dict(zip(("tensor", "expert", "none"), cuts, strict=True))
    elements: Counter[str] = Counter()
    for weight in weights:
        here = weight.num_elements // parts[weight.split]
        if weight.is_buffer:
            elements["buffers"] += here
            continue
        elements["parameters"] += here
        if weight.component == "indexer":
            elements["frozen"] += here
        else:
            elements["expert" if weight.split == "expert" else "dense"] += _aligned(weight, parts[weight.split])
    return elements


def _aligned(weight: Weight, parts: int) -> int:
    """Return a weight's elements in Megatron's buffer; experts are distributed, all others are split."""
    here = weight.num_elements // parts
    tensors = max(1, weight.count // parts) if weight.split == "expert" else weight.count
    return tensors * _round_up(here // tensors, PARAMETER_ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

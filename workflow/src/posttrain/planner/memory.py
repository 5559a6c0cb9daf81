"""GPU memory of the trainer, stage by stage, and its host memory.

Counted, per rank: weights, the gradient buffer, and the optimizer's state under Megatron's distributed
optimizer.

    bf16   weight 2 B   gradient 4 B (accumulated in FP32)   FP32 master copy, first and second moment 12 B / shards
    fp32   weight 4 B   gradient 4 B                         first and second moment 8 B / shards
                                                             (the weight is its own master copy)

Tensor parallelism (TP) cuts what has heads, dense and shared MLPs, embedding and output matrix; latent
projections, norms, router and indexer stand on every rank. Expert parallelism (EP) spreads the experts,
expert tensor parallelism (ETP) cuts each. The optimizer's state of a dense weight is spread over the ranks
that hold the same piece: world / (TP PP); of an expert's over world / (EP ETP PP). Router biases have neither
gradient nor state.

Not counted (see `NOT_MODELLED`): what depends on tokens, buckets and kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from posttrain.config.derived import layers_per_stage, world_size
from posttrain.config.schema import Config
from posttrain.planner.model_size import Weight, decoder_weights, edge_weights

GIB = 1 << 30
NOT_MODELLED = (
    "trainer memory: activations and logits of a micro-batch, communication buffers, kernels' workspaces, "
    "the CUDA context and fragmentation",
    "host memory: data, pinned copies, what a sleeping trainer or engine leaves in host memory",
)


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that one parameter costs on a rank; `optimizer` is divided by the number of shards."""

    weight: int
    gradient: int
    optimizer: int


BYTES = {"bf16": BytesPerParameter(2, 4, 12), "fp32": BytesPerParameter(4, 4, 8)}


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage.

    Args:
        stage: Its number, from 0.
        num_layers: Decoder layers in it.
        parameters_per_rank: Parameters that one rank holds.
        weights_bytes: Their bytes.
        gradients_bytes: Gradient buffer.
        optimizer_bytes: Optimizer state on this rank, wherever it lies (GPU, or host when offloaded).
        optimizer_on_host: The optimizer's state is offloaded.
    """

    stage: int
    num_layers: int
    parameters_per_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_on_host: bool

    @property
    def total_gib(self) -> float:
        """GiB on the GPU (on a CPU machine: in host memory)."""
        optimizer = 0 if self.optimizer_on_host else self.optimizer_bytes
        return (self.weights_bytes + self.gradients_bytes + optimizer) / GIB

    def as_dict(self) -> dict[str, float]:
        """Return the stage as it stands in `plan.json`."""
        return {**asdict(self), "total_gib": round(self.total_gib, 4)}


def stage_memory(config: Config) -> list[StageMemory]:
    """Return the memory of a rank of each pipeline stage.

    Example:
        GLM-5 on 16 nodes (TP4 PP4 CP2 EP32, [20, 20, 20, 18] layers): 111.55 GiB in the middle stages.
    """
    layers, (first, last) = (
        decoder_weights(config.model.architecture),
        edge_weights(config.model.architecture),
    )
    memory, start = [], 0
    counts = layers_per_stage(config)
    for stage, count in enumerate(counts):
        weights = [weight for layer in layers[start : start + count] for weight in layer]
        weights += first if stage == 0 else ()
        weights += last if stage == len(counts) - 1 else ()
        memory.append(_memory_of(config, stage, count, weights))
        start += count
    return memory


def host_memory_gib_per_node(config: Config) -> float:
    """Return host memory of a node's trainer ranks, for the fullest stage.

    On a CPU machine that is all they hold. With GPUs it is the optimizer's state when it is offloaded, else
    nothing that is modelled.
    """
    stages = stage_memory(config)
    if config.hardware.device == "cpu":
        per_rank = max(stage.total_gib for stage in stages)
    else:
        per_rank = max(stage.optimizer_bytes if stage.optimizer_on_host else 0 for stage in stages) / GIB
    return per_rank * config.hardware.gpus_per_node


def _memory_of(config: Config, stage: int, num_layers: int, weights: Iterable[Weight]) -> StageMemory:
    parallel, cost = config.parallel, BYTES[config.trainer.params_dtype]
    expert_size = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    stages = parallel.pipeline_model_parallel_size
    parts = {"tensor": parallel.tensor_model_parallel_size, "expert": expert_size, "none": 1}
    dense_shards = world_size(config) // (parallel.tensor_model_parallel_size * stages)
    expert_shards = world_size(config) // (expert_size * stages)
    trained = [weight for weight in weights if not weight.is_buffer]
    dense = sum(weight.num_elements // parts[weight.split] for weight in trained if weight.split != "expert")
    expert = sum(weight.num_elements // parts[weight.split] for weight in trained if weight.split == "expert")
    return StageMemory(
        stage=stage,
        num_layers=num_layers,
        parameters_per_rank=dense + expert,
        weights_bytes=(dense + expert) * cost.weight,
        gradients_bytes=(dense + expert) * cost.gradient,
        optimizer_bytes=cost.optimizer * dense // dense_shards + cost.optimizer * expert // expert_shards,
        optimizer_on_host=config.trainer.optimizer_cpu_offload,
    )

"""What one node's ranks and engines need of a checkpoint. Pure arithmetic.

Ranks are numbered node by node. Megatron counts them in the order tp-cp-ep-dp-pp: a pipeline stage is a run of
consecutive ranks, and within it expert parallelism counts every ETP-th rank (tp-ep-dp-pp with ETP for tp).

Source: megatron/core/parallel_state.py, `RankGenerator` and `initialize_model_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from posttrain.config.derived import engine_gpus, engine_nodes, engines_load, stage_chunks, trainer_nodes, world_size
from posttrain.config.schema import Config


@dataclass(frozen=True)
class NodeShare:
    """A node's part in a run.

    Args:
        experts_of_layer: Decoder layer -> the routed experts of it that a rank here holds; layers of other nodes only
            are absent.
        has_embedding: A rank here holds the embedding.
        has_output: A rank here holds the final norm and the output matrix.
        loads_engine: An engine, or a part of one, runs here and loads weights: each of its processes reads every shard.
            One that takes turns with the trainer starts without any.
    """

    experts_of_layer: Mapping[int, frozenset[int]]
    has_embedding: bool
    has_output: bool
    loads_engine: bool

    @property
    def has_ranks(self) -> bool:
        """Trainer ranks run here."""
        return bool(self.experts_of_layer)


def node_share(config: Config, node: int) -> NodeShare:
    """Return what node number `node`, from 0, takes part in.

    Example:
        GLM-5 on 16 nodes of 8 GPUs (PP4 EP32): node 5 holds layers 20 to 39, experts 64 to 127 of each.
    """
    per_node, stages = config.hardware.gpus_per_node, config.parallel.pipeline_model_parallel_size
    stage_ranks = world_size(config) // stages
    held: dict[int, set[int]] = {}
    for rank in range(node * per_node, (node + 1) * per_node) if node < trainer_nodes(config) else ():
        stage, place = divmod(rank, stage_ranks)
        held.setdefault(stage, set()).update(_experts_at(config, place))
    chunks = stage_chunks(config)
    return NodeShare(
        experts_of_layer={
            layer: frozenset(experts) for stage, experts in held.items() for layer in chain(*chunks[stage])
        },
        # A last stage whose output matrix is the embedding has a copy of it.
        has_embedding=0 in held or (stages - 1 in held and config.model.architecture.tie_word_embeddings),
        has_output=stages - 1 in held,
        loads_engine=engines_load(config) and node in engine_nodes(config) and _has_engine(config, node),
    )


def _experts_at(config: Config, place: int) -> range:
    parallel, num_experts = config.parallel, config.model.architecture.n_routed_experts
    size = num_experts // parallel.expert_model_parallel_size
    index = place // parallel.expert_tensor_parallel_size % parallel.expert_model_parallel_size
    return range(index * size, (index + 1) * size)


def _has_engine(config: Config, node: int) -> bool:
    """Return whether engines need a node of those that they may have, which they fill one after the other."""
    before = (node - engine_nodes(config).start) * config.hardware.gpus_per_node
    return config.hardware.device == "cpu" or before < engine_gpus(config)

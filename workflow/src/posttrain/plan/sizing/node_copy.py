"""Cost of each choice of `stage.copy`: bytes on a node's disk, and bytes read from shared storage.

Sizes are sums of tensors. With slices, whole files are copied, so a node gets more than its tensors. The excess depends
on file boundaries, which are known only after the conversion; it is bounded here. A run of consecutive tensors that a
node needs adds at most one file at each end, and a node never gets more than all tensors of its layers and one file at
each end of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.config.derived import engine_nodes, engines_load
from posttrain.config.node_share import NodeShare, node_share
from posttrain.config.schema import Config
from posttrain.plan.sizing.model_size import Weight, decoder_weights, edge_weights, saved_weights

CHOICES = ("nothing", "slices", "everything")
# The largest file of a converted checkpoint (`checkpoint.formats.torch_dist.MAX_FILE_BYTES`, which needs torch).
FILE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class NodeCopy:
    """Cost of a choice of `stage.copy`.

    Args:
        choice: A value of `stage.copy`.
        least_bytes: Size of the tensors that the fullest node needs.
        node_bytes: Maximum size of the copy on the fullest node.
        num_nodes: Number of nodes with a copy: all training nodes, or those that the site names.
        all_nodes_bytes: Maximum size on all of them together.
        shared_read_bytes: Maximum bytes that staging reads from shared storage.
    """

    choice: str
    least_bytes: int
    node_bytes: int
    num_nodes: int
    all_nodes_bytes: int
    shared_read_bytes: int


def node_copies(config: Config) -> list[NodeCopy]:
    """Return the cost of each choice in this configuration, in the order of `CHOICES`."""
    return [node_copy(config, choice) for choice in CHOICES]


def node_copy(config: Config, choice: str) -> NodeCopy:
    """Return the cost of a choice of `stage.copy`.

    Example:
        GLM-5, everything: 1,507,728,316,928 bytes on every node; with FP8 engines that do not sleep 754,... more.
    """
    nodes = len(config.site.node_names) or config.nodes
    whole = _torch_dist_bytes(config) + _rollout_bytes(config)
    if choice == "nothing":
        return NodeCopy(choice, 0, 0, nodes, 0, 0)
    if choice == "everything":
        bounds = [(size, size) for size in _whole_copies(config, nodes)]
    else:
        bounds = [_slice_bounds(config, node_share(config, node)) for node in range(min(nodes, config.nodes))]
    total = sum(most for _, most in bounds)
    read = min(whole, total) if config.stage.broadcast != "none" else total
    return NodeCopy(choice, max(least for least, _ in bounds), max(most for _, most in bounds), nodes, total, read)


def _whole_copies(config: Config, nodes: int) -> list[int]:
    """Return the bytes on each node: files that its ranks load, that its engines load, or both."""
    if not config.engine.own_nodes:
        return [_torch_dist_bytes(config) + _rollout_bytes(config)] * nodes
    for_engines = engine_nodes(config)
    return [_rollout_bytes(config) if node in for_engines else _torch_dist_bytes(config) for node in range(nodes)]


def _torch_dist_bytes(config: Config) -> int:
    arch = config.model.architecture
    return _bytes(saved_weights(arch))


def rollout_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint in the rollouts' precision, which loading engines read completely."""
    arch = config.model.architecture
    saved = saved_weights(arch)
    return sum(weight.fp8_bytes for weight in saved) if config.rollout.fp8 else _bytes(saved)


def _rollout_bytes(config: Config) -> int:
    return rollout_bytes(config) if engines_load(config) else 0


def _slice_bounds(config: Config, share: NodeShare) -> tuple[int, int]:
    """Return the bytes of the tensors that a node needs, and an upper bound for the files that contain them."""
    arch = config.model.architecture
    layers, (first, last) = decoder_weights(arch), edge_weights(arch)
    edges = _bytes(first) * share.has_embedding + _bytes(last) * share.has_output
    needed, of_layers, num_runs = edges, edges, 3
    for index, experts in share.experts_of_layer.items():
        routed = _bytes(weight for weight in layers[index] if weight.component == "routed_experts")
        rest = _bytes(layers[index]) - routed
        part = routed * len(experts) // max(1, arch.n_routed_experts)
        needed, of_layers = needed + rest + part, of_layers + rest + routed
        num_runs += 2 if part < routed else 0
    files = min(needed + 2 * num_runs * FILE_BYTES, of_layers + 6 * FILE_BYTES, _torch_dist_bytes(config))
    rollout = _rollout_bytes(config) if share.loads_engine else 0
    return needed + rollout, files + rollout


def _bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.bf16_bytes for weight in weights)

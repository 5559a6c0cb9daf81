"""Copy a node's weights to its own disk, and record the disk's content."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.staging.node_local import StagedSource
from posttrain.checkpoint.staging.node_weights import NodeWeights
from posttrain.checkpoint.staging.staging_record import write_node_record
from posttrain.cli import RESOLVED, command_line, run
from posttrain.store import require_files


def main() -> None:
    """Check the sources, copy missing or invalid files, write the record."""
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        torch_dist=Path,
        torch_dist_receipt=Path,
        rollout_weights=Path,
        rollout_receipt=Path,
        destination=(Path, "folder on this node's own disk"),
        node=(str, "name of this node"),
        peers=(Path, "shared folder where nodes that copy meet"),
        record=(Path, "what the disk then holds, as JSON"),
    )
    config = args.resolved.config
    weights = NodeWeights(
        config,
        rank=config.site.node_names.index(args.node),
        name=args.node,
        torch_dist=StagedSource(args.torch_dist, require_files(args.torch_dist, args.torch_dist_receipt)),
        rollout=StagedSource(args.rollout_weights, require_files(args.rollout_weights, args.rollout_receipt)),
        destination=args.destination,
        peers=args.peers,
    )
    args.record.unlink(missing_ok=True)
    write_node_record(args.record, args.node, args.destination, weights.stage())


if __name__ == "__main__":
    run(main)

"""Copy the weights that a node needs to its own disk, and record what the disk then holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import require_files
from posttrain.checkpoint.staging.node_local import StagedSource
from posttrain.checkpoint.staging.node_weights import NodeWeights
from posttrain.checkpoint.staging.staging_record import write_node_record
from posttrain.cli import add_configuration, run


def main() -> None:
    """Check the sources, copy what is missing or wrong, write the record."""
    args = parse_arguments()
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


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    parser.add_argument("--torch-dist", required=True, type=Path)
    parser.add_argument("--torch-dist-receipt", required=True, type=Path)
    parser.add_argument("--rollout-weights", required=True, type=Path)
    parser.add_argument("--rollout-receipt", required=True, type=Path)
    parser.add_argument("--destination", required=True, type=Path, help="folder on this node's own disk")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--peers", required=True, type=Path, help="shared folder where nodes that copy meet")
    parser.add_argument("--record", required=True, type=Path, help="what the disk then holds, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

"""Copy checkpoints to the disk of the node that this runs on, and testify what the disk holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import require_files
from posttrain.checkpoint.node_local import Origin, stage, write_testimony
from posttrain.cli import run


def main() -> None:
    """Check the sources, copy what is missing or wrong, write the testimony."""
    args = parse_arguments()
    origins = [
        Origin(source, require_files(source, receipt))
        for source, receipt in zip(args.source, args.source_receipt, strict=True)
    ]
    args.testimony.unlink(missing_ok=True)
    copies = stage(origins, args.destination, args.workers, args.reread)
    write_testimony(args.testimony, args.node, args.destination, copies)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, action="append", type=Path, help="folder; may be repeated")
    parser.add_argument("--source-receipt", required=True, action="append", type=Path, help="one per source")
    parser.add_argument("--destination", required=True, type=Path, help="folder on this node's own disk")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--testimony", required=True, type=Path, help="what the disk then holds, as JSON")
    parser.add_argument("--workers", type=int, default=8, help="files handled at a time")
    parser.add_argument("--reread", action="store_true", help="read every written file back and compare")
    args = parser.parse_args()
    if len(args.source) != len(args.source_receipt):
        parser.error("give one --source-receipt per --source")
    if len({source.name for source in args.source}) != len(args.source):
        parser.error("the sources need different folder names")
    return args


if __name__ == "__main__":
    run(main)

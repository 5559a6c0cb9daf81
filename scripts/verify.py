"""Prove where every byte of a run came from: follow the receipts' digests to the source, hash every file again."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import Paths, write_json
from posttrain.checkpoint.verification import prove
from posttrain.cli import add_configuration, run


def main() -> None:
    """Check everything, show it, and fail by naming whatever is not what it should be."""
    arguments = parse_arguments()
    paths = Paths(arguments.resolved)
    if arguments.output:
        # What was proven once may not hold any more.
        arguments.output.unlink(missing_ok=True)
    verified = prove(paths, content=not arguments.sizes_only)
    if arguments.output:
        write_json(arguments.output, verified)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    parser.add_argument("--output", type=Path, help="JSON with what was verified, written when all is well")
    parser.add_argument("--sizes-only", action="store_true", help="compare names and sizes, read no content")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

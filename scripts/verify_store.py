"""Prove where every byte of the checkpoints that a run begins with came from, before there is a run."""

from __future__ import annotations

import argparse

from posttrain.artifacts import Paths
from posttrain.checkpoint.verification import prove
from posttrain.cli import add_configuration, run


def main() -> None:
    """Check everything, show it, and fail by naming whatever is not what it should be."""
    arguments = parse_arguments()
    paths = Paths(arguments.resolved)
    prove(paths, content=not arguments.sizes_only, whole_run=False)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    parser.add_argument("--sizes-only", action="store_true", help="compare names and sizes, read no content")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

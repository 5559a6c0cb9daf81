"""Wait for training whose driver has died, show its progress, and end with its state."""

from __future__ import annotations

import argparse

from posttrain.artifacts import Paths
from posttrain.cli import add_configuration, run
from posttrain.launch.attach import attach
from posttrain.planner.layout_choice import resolve


def main() -> None:
    """Wait, and say what comes next."""
    arguments = parse_arguments()
    print(attach(Paths(resolve(arguments.workflow, arguments.config_dir))), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

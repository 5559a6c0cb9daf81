"""Wait for training whose driver has died, show its progress, and end with its state."""

from __future__ import annotations

from posttrain.artifacts import Paths
from posttrain.cli import parse_configuration, run
from posttrain.launch.attach import attach


def main() -> None:
    """Wait, and say what comes next."""
    print(attach(Paths(parse_configuration(__doc__))), flush=True)


if __name__ == "__main__":
    run(main)

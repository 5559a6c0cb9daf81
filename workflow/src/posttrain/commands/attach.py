"""Wait for training whose driver has died, show its progress, and end with its state."""

from __future__ import annotations

from posttrain.artifacts import Paths
from posttrain.launch.attach import attach


def main(paths: Paths) -> None:
    """Wait, and say what comes next."""
    print(attach(paths), flush=True)

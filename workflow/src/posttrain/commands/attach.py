"""Wait for training whose driver has died, show its progress, and end with its state."""

from __future__ import annotations

from posttrain.cluster.attach import attach
from posttrain.store import Paths


def main(paths: Paths) -> None:
    """Wait, and say what comes next."""
    print(attach(paths), flush=True)

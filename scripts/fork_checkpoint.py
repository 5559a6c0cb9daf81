"""Begin a run with the weights and optimizer state of another run at one of its steps."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.cli import RESOLVED, command_line, run
from posttrain.errors import ConfigError, Problem
from posttrain.rl.training.fork import begin_fork
from posttrain.store import Paths, write_receipt


def main() -> None:
    """Copy the checkpoint, and record its run in a receipt."""
    arguments = command_line(
        __doc__,
        resolved=RESOLVED,
        receipt=(Path, "receipt of the fork, written last"),
    )
    started = time.time()
    paths = Paths(arguments.resolved)
    if not paths.resolved.fork:
        raise ConfigError([Problem("not-set", "fork", "not set", "RUN@STEP", "--config fork=RUN@STEP")])
    write_receipt(arguments.receipt, begin_fork(paths), started)


if __name__ == "__main__":
    run(main)

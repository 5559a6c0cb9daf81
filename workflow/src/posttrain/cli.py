"""Start and end of the workflow's scripts.

`run(main)` sets up logging, calls `main`, and turns failures that a user can fix into one clear message and exit
code 1. Any other exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.cluster.processes import follow_driver
from posttrain.config.load import Resolved
from posttrain.errors import CheckpointError, ConfigError, explain
from posttrain.report.logging import configure_logging
from posttrain.report.rank_progress import write_exit_reason
from posttrain.store.resolved_file import read_resolved

log = logging.getLogger(__name__)


def _resolved(path: str) -> Resolved:
    return read_resolved(Path(path))


# The option of most steps.
RESOLVED = (_resolved, "a file of logs/configs")


def command_line(description: str | None, **options: Any) -> argparse.Namespace:
    """Return the arguments that a rule gives to its script.

    Args:
        description: What the script does.
        options: Name -> type of a required option, alone or with a line of help; for other options the keywords of
            `add_argument`.
    """
    parser = argparse.ArgumentParser(description=description)
    for name, wanted in options.items():
        add_option(parser, name, wanted)
    return parser.parse_args()


def add_option(parser: argparse.ArgumentParser, name: str, wanted: Any, **more: Any) -> None:
    """Add an option of `command_line`."""
    if not isinstance(wanted, dict):
        reads, words = wanted if isinstance(wanted, tuple) else (wanted, None)
        wanted = {"type": reads, "help": words, "required": True}
    parser.add_argument(f"--{name.replace('_', '-')}", **(wanted | more))


def run(main: Callable[[], None], role: str | None = None) -> None:
    """Run a script's `main` and exit with 0, or with 1 and a message.

    Args:
        main: The script; it parses its own arguments.
        role: The process in the log, if several processes share one.
    """
    try:
        configure_logging(role)
        follow_driver()
        main()
    except (ConfigError, CheckpointError, RuntimeError, OSError) as error:
        is_outside = not isinstance(error, ConfigError | CheckpointError)
        if is_outside and os.environ.get("POSTTRAIN_TRACEBACK"):
            raise
        # A wrong configuration stays wrong in the next attempt; a file that could not be read may be readable then.
        is_final = isinstance(error, ConfigError) and error.__cause__ is None
        if refusal := str(error) if is_final else explain(error):
            write_exit_reason(refusal)
            _refuse(refusal)
        cause = f"\n  caused by: {error.__cause__}" if error.__cause__ else ""
        _refuse(f"{error}{cause}\n  (POSTTRAIN_TRACEBACK=1 shows where it happened)" if is_outside else str(error))
    except KeyboardInterrupt:
        # Print this once; threads that still work on their last chunk end with the process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _refuse("interrupted; run the same command again to go on")


def _refuse(message: str) -> None:
    log.error("%s: %s", os.path.basename(sys.argv[0]), message)
    sys.exit(1)

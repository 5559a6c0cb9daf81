"""End-to-end RL post-training of large language models as a Snakemake workflow."""

import os
import sys
from types import TracebackType

__version__ = "0.2.0"


def _end_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with one line on Ctrl-C during imports, which take seconds, instead of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: interrupted; run the same command again to go on\n")
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_in_one_line

# Import after the hook is set, so that Ctrl-C ends in one line from the first import on.
from posttrain.moved_modules import find_moved_modules  # noqa: E402

find_moved_modules()

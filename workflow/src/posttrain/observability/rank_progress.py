"""Where a trainer rank is, for its node's supervisor: a line in a file on the node itself, rewritten at each phase.

A rank that hangs can tell nobody. What it last wrote stays, and the stacks of all ranks tell who waits for whom. Nor
can one for which the disk of its log is full: why the machine refused to write is left beside that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROGRESS_VARIABLE = "POSTTRAIN_RANK_PROGRESS"
# Phases in which engines and graders work, which have deadlines of their own: the rank that waits says that it lives.
ROLLOUT, EVALUATION = "rollout", "evaluation"
# How often a rank that waits for engines says that it lives.
BEAT_SECONDS = 5.0
# Rank 0 has the rollout, and the others are about to get it: no phase of its own, but a place where ranks can hang.
SHARE_ROLLOUT = "share_rollout"
# A step is done, and its checkpoint is about to be written in a thread: the same.
BEGIN_SAVE = "begin_save"
# Longer than any step, phase and clock; of one length, so that a line replaces the whole line before it.
_LINE_BYTES = 64


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is.

    Args:
        step: From 0.
        phase: Name of the phase that it has entered last.
        since: When it did, or last said so again, in seconds of the node's monotonic clock.
    """

    step: int
    phase: str
    since: float


def report_progress(step: int, phase: str) -> None:
    """Write where this process is; does nothing where no supervisor has asked for it."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path:
        return
    line = f"{step} {phase} {time.monotonic():.3f}".ljust(_LINE_BYTES).encode()
    # One write of fixed length: who reads at the same time sees the old line or the new one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, line, 0)
    finally:
        os.close(descriptor)


async def keep_reporting(step: int, phase: str) -> None:
    """Write where this process is again and again, as long as its event loop turns; ends when it is cancelled."""
    while True:
        report_progress(step, phase)
        await asyncio.sleep(BEAT_SECONDS)


def leave_last_words(text: str) -> None:
    """Write why this process ends, and would end again; does nothing where no supervisor has asked for it."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError):
            last_words_of(Path(path)).write_text(text, encoding="utf-8")


def last_words_of(progress: Path) -> Path:
    """Return where `leave_last_words` writes, given where the rank says in which phase it is."""
    return progress.with_name(f"{progress.name}.last-words")


def read_progress(path: Path) -> RankProgress | None:
    """Return what a rank has written last; None before its first step."""
    if not path.exists():
        return None
    words = path.read_text().split()
    return RankProgress(int(words[0]), words[1], float(words[2])) if len(words) == 3 else None

"""The progress of a trainer rank, for its node's supervisor: a line in a node-local file, rewritten at each phase.

In the longest phases a rank also records each pass through the model. A busy processor is no sign of progress on GPUs:
a rank that waits for its device spins.

A rank that hangs cannot report. Its last line remains, and the stacks of all ranks show which rank waits for which. If
the disk of its log is full, the error is left beside that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, fields, replace
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
# In a phase of many micro-batches: the passes through the model, and what comes after them.
FORWARD, BACKWARD, AFTER_PASSES = "forward", "backward", "after_passes"
# A phase was entered, and no mark of it was passed.
NO_MARK = "-"
# Longer than any step, phase and clock; of one length, so that a line replaces the whole line before it.
_LINE_BYTES = 128


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is.

    Args:
        step: From 0.
        phase: Name of the phase that it has entered last.
        since: When it did, or last said so again, in seconds of the node's monotonic clock.
        mark: The last mark that it has passed in it, NO_MARK for none.
        marks: How many.
        moved: When it passed the last one, or entered the phase.
        usual: Seconds from there to the next mark or phase, the longest that this rank has seen; below 0: never yet.
    """

    step: int
    phase: str
    since: float
    mark: str
    marks: int
    moved: float
    usual: float


class _Journey:
    """What this process has said, and how long it was from one mark to the next; only its main thread moves."""

    def __init__(self) -> None:
        self._here: RankProgress | None = None
        self._longest: dict[tuple[str, str], float] = {}

    def enter(self, step: int, phase: str) -> RankProgress:
        """Enter a phase, perhaps the same again."""
        now = self._arrive()
        return self._be(RankProgress(step, phase, now, NO_MARK, 0, now, self._longest.get((phase, NO_MARK), -1.0)))

    def pass_by(self, mark: str) -> RankProgress | None:
        """Pass a mark; None outside of phases."""
        if self._here is None:
            return None
        now, usual = self._arrive(), self._longest.get((self._here.phase, mark), -1.0)
        return self._be(replace(self._here, mark=mark, marks=self._here.marks + 1, moved=now, usual=usual))

    def _be(self, here: RankProgress) -> RankProgress:
        self._here = here
        return here

    def _arrive(self) -> float:
        now = time.monotonic()
        if self._here:
            kind = self._here.phase, self._here.mark
            self._longest[kind] = max(self._longest.get(kind, 0.0), now - self._here.moved)
        return now


_JOURNEY = _Journey()


def report_progress(step: int, phase: str) -> None:
    """Write where this process is; does nothing where no supervisor has asked for it."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        _write(path, _JOURNEY.enter(step, phase))


def report_mark(mark: str) -> None:
    """Write that this process has moved within its phase; does nothing where no supervisor has asked for it."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path and (here := _JOURNEY.pass_by(mark)):
        _write(path, here)


def _write(path: str, here: RankProgress) -> None:
    words = f"{here.step} {here.phase} {here.since:.3f} {here.mark} {here.marks} {here.moved:.3f} {here.usual:.3f}"
    # One write of fixed length: who reads at the same time sees the old line or the new one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, words.ljust(_LINE_BYTES).encode(), 0)
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


def name_silent(url: str) -> None:
    """Have an engine ended that does not answer any more; does nothing where no supervisor has asked for progress."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        named = _silent_of(Path(path))
        named.with_suffix(".new").write_text(url, encoding="utf-8")
        named.with_suffix(".new").replace(named)


def take_silent(progress: Path) -> str:
    """Return the engine that `name_silent` has named since the last look; empty for none."""
    named = _silent_of(progress)
    if not named.exists():
        return ""
    url = named.read_text(encoding="utf-8")
    named.unlink()
    return url


def _silent_of(progress: Path) -> Path:
    return progress.with_name(f"{progress.name}.silent")


def read_progress(path: Path) -> RankProgress | None:
    """Return what a rank has written last; None before its first step."""
    if not path.exists():
        return None
    words = path.read_text().split()
    if len(words) != len(fields(RankProgress)):
        return None
    step, phase, since, mark, marks, moved, usual = words
    return RankProgress(int(step), phase, float(since), mark, int(marks), float(moved), float(usual))

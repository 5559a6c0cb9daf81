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
# Phases in which a rank waits for engines and graders, which have their own deadlines; it writes a heartbeat.
ROLLOUT, EVALUATION = "rollout", "evaluation"
# Interval of the heartbeat.
BEAT_SECONDS = 5.0
# Rank 0 sends the rollout to the other ranks: not a phase of a step, but ranks can hang here.
SHARE_ROLLOUT = "share_rollout"
# A step is done, and a thread begins to write its checkpoint: ranks can hang here, too.
BEGIN_SAVE = "begin_save"
# Marks in a phase with many micro-batches: passes through the model, and the end of the last pass.
FORWARD, BACKWARD, AFTER_PASSES = "forward", "backward", "after_passes"
# No mark of this phase was passed yet.
NO_MARK = "-"
# A fixed length that fits every line, so a line replaces the previous one completely.
_LINE_BYTES = 128


@dataclass(frozen=True)
class RankProgress:
    """The position of a rank within a step.

    Args:
        step: From 0.
        phase: The phase that the rank entered last.
        since: Time of that entry or of the last heartbeat, in seconds of the node's monotonic clock.
        mark: The last mark passed in the phase, or NO_MARK.
        marks: Number of marks passed in the phase.
        moved: Time of the last mark, or of the entry into the phase.
        usual: Longest time this rank has needed from here to the next mark or phase, in seconds; negative: unknown.
    """

    step: int
    phase: str
    since: float
    mark: str
    marks: int
    moved: float
    usual: float


class _ProgressTracker:
    """The progress of this process and the longest time between any two marks; used by the main thread alone."""

    def __init__(self) -> None:
        self._here: RankProgress | None = None
        self._longest: dict[tuple[str, str], float] = {}

    def enter(self, step: int, phase: str) -> RankProgress:
        """Enter a phase, or enter it again."""
        now = self._arrive()
        return self._be(RankProgress(step, phase, now, NO_MARK, 0, now, self._longest.get((phase, NO_MARK), -1.0)))

    def pass_mark(self, mark: str) -> RankProgress | None:
        """Pass a mark; return None outside of phases."""
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


_TRACKER = _ProgressTracker()


def report_progress(step: int, phase: str) -> None:
    """Write the phase of this process, if a supervisor reads it."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        _write(path, _TRACKER.enter(step, phase))


def report_mark(mark: str) -> None:
    """Write that this process passed a mark of its phase, if a supervisor reads it."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path and (here := _TRACKER.pass_mark(mark)):
        _write(path, here)


def _write(path: str, here: RankProgress) -> None:
    words = f"{here.step} {here.phase} {here.since:.3f} {here.mark} {here.marks} {here.moved:.3f} {here.usual:.3f}"
    # One write of fixed length, so a concurrent reader sees either the old line or the new one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, words.ljust(_LINE_BYTES).encode(), 0)
    finally:
        os.close(descriptor)


async def keep_reporting(step: int, phase: str) -> None:
    """Write a heartbeat for as long as the event loop runs; ends when it is cancelled."""
    while True:
        report_progress(step, phase)
        await asyncio.sleep(BEAT_SECONDS)


def write_exit_reason(text: str) -> None:
    """Write why this process ends and must not be restarted, if a supervisor reads it."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError):
            exit_reason_path(Path(path)).write_text(text, encoding="utf-8")


def exit_reason_path(progress: Path) -> Path:
    """Return the file of `write_exit_reason`, which is next to the rank's progress file."""
    return progress.with_name(f"{progress.name}.last-words")


def report_unresponsive_engine(url: str) -> None:
    """Report an engine that no longer answers, so that the supervisor ends it, if there is one."""
    if path := os.environ.get(PROGRESS_VARIABLE):
        named = _unresponsive_path(Path(path))
        named.with_suffix(".new").write_text(url, encoding="utf-8")
        named.with_suffix(".new").replace(named)


def take_unresponsive_engine(progress: Path) -> str:
    """Return the engine reported since the last call, or ""."""
    named = _unresponsive_path(progress)
    if not named.exists():
        return ""
    url = named.read_text(encoding="utf-8")
    named.unlink()
    return url


def _unresponsive_path(progress: Path) -> Path:
    return progress.with_name(f"{progress.name}.silent")


def read_progress(path: Path) -> RankProgress | None:
    """Return the last progress of a rank, or None before its first step."""
    if not path.exists():
        return None
    words = path.read_text().split()
    if len(words) != len(fields(RankProgress)):
        return None
    step, phase, since, mark, marks, moved, usual = words
    return RankProgress(int(step), phase, float(since), mark, int(marks), float(moved), float(usual))

"""Detects hanging ranks from the position of each rank, and from all stacks if no rank moves.

All ranks of a step go through the same phases and meet in collectives, so a rank that stops blocks the others in the
same or the next phase. The timeout of a phase is ten times its longest duration so far, at least 90 s and at most
`launch.hang_timeout_seconds`. The same timeout applies between two marks within a phase (`rank_progress`) if no rank
passes its next mark. Rollouts and evaluations have no limit, because engines and graders have their own deadlines; the
rank that waits for them reports that it is alive. Two phases have no known duration: the first run of a phase may
compile kernels, and the wait for a checkpoint depends on the rollout that overlaps it. Both may take up to the limit,
but no longer than 90 s in which no rank uses its processor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.plan.sizing.phases import PHASES
from posttrain.report.rank_progress import BEGIN_SAVE, EVALUATION, ROLLOUT, SHARE_ROLLOUT

# Their duration depends on storage, and on how much of a save a rollout overlaps.
SAVES = ("save", BEGIN_SAVE)
# A shared file system may stall for a minute, so 90 s. Longer samples, a garbage collection or a busy neighbour
# lengthen a phase a few times, so a factor of ten.
TIMEOUT_FACTOR, SHORTEST_TIMEOUT_SECONDS = 10.0, 90.0
ENGINES_WORK = (EVALUATION, ROLLOUT)
_ORDER = [EVALUATION, ROLLOUT, SHARE_ROLLOUT, *(name for name in PHASES if name != ROLLOUT), BEGIN_SAVE]
# Frames of torch's collectives and of Megatron's pipeline exchange in a stack of `faulthandler`.
_COLLECTIVE = re.compile(r'File "[^"]*/(?:distributed_c10d|p2p_communication)\.py", line \d+ in ([a-z]\w*)')
_WRAPPER = "wrapper"


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Args:
        step: From 0.
        phase: Name of the phase.
        seconds: Seconds since the phase began.
        is_idle: The rank has not used its processor for `SHORTEST_TIMEOUT_SECONDS`.
        marks: Number of marks passed in this phase.
        still: Seconds since the last mark.
        usual: The longest earlier duration to the next mark in seconds; negative: unknown.
    """

    step: int
    phase: str
    seconds: float
    is_idle: bool = False
    marks: int = 0
    still: float = 0.0
    usual: float = -1.0

    @property
    def place(self) -> tuple[int, int]:
        """The position in the order of all phases of all steps."""
        return self.step, _ORDER.index(self.phase)


@dataclass
class HangWatch:
    """Decides whether ranks hang.

    Args:
        limit_seconds: The longest timeout.
    """

    limit_seconds: float
    _longest: dict[str, float] = field(default_factory=dict)
    _last: dict[int, Position] = field(default_factory=dict)

    def observe(self, positions: Mapping[int, Position]) -> str | None:
        """Return a description of the hang, or None.

        Args:
            positions: Rank -> its position, for every rank in a step.
        """
        for rank, position in positions.items():
            before = self._last.get(rank)
            if before and before.place != position.place:
                self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), before.seconds)
            if before and before.step < position.step:
                # A phase that began and ended between two polls took less than one poll interval.
                self._longest = dict.fromkeys(_ORDER, 0.0) | self._longest
        self._last = dict(positions)
        if not positions:
            return None
        front = max(position.place for position in positions.values())
        leading = [position for position in positions.values() if position.place == front]
        behind = {rank: p for rank, p in positions.items() if p.place != front}
        waited = min(position.seconds for position in leading)
        if behind and waited > self._timeout(leading[0].phase):
            return f"{_list_of(behind)}, while others have been in {_name(leading[0])} for {waited:.0f} s"
        if not behind and waited > self._timeout(leading[0].phase):
            return f"no rank has left {_name(leading[0])} for {waited:.0f} s"
        if leading[0].phase not in ENGINES_WORK and all(position.is_idle for position in positions.values()):
            return f"no rank has computed anything for {SHORTEST_TIMEOUT_SECONDS:.0f} s, in {_name(leading[0])}"
        if all(position.still > self._patience(position) for position in positions.values()):
            still = min(position.still for position in positions.values())
            return f"no rank has moved for {still:.0f} s, in {_name(leading[0])}{_fewest(positions)}"
        return None

    def _patience(self, position: Position) -> float:
        """Return the timeout from one mark to the next, in seconds."""
        if position.usual < 0 or position.phase in (*ENGINES_WORK, *SAVES):
            return self.limit_seconds
        return self._at_most(position.usual)

    def _timeout(self, phase: str) -> float:
        if phase in ENGINES_WORK:
            return min(self.limit_seconds, SHORTEST_TIMEOUT_SECONDS)
        if phase in SAVES or phase not in self._longest:
            return self.limit_seconds
        return self._at_most(self._longest[phase])

    def _at_most(self, usual: float) -> float:
        return min(self.limit_seconds, max(SHORTEST_TIMEOUT_SECONDS, TIMEOUT_FACTOR * usual))


def waiting_in(stack: str) -> str | None:
    """Return the collective or exchange in which a stack waits; None outside of any.

    Args:
        stack: Text after "Current thread", innermost frame first.
    """
    return next((name for name in _COLLECTIVE.findall(stack) if name != _WRAPPER), None)


def describe_stacks(stacks: Mapping[int, str | None], node_of: Mapping[int, str]) -> str:
    """Return which ranks wait in which collective, then the suspects: the ranks that wait in none.

    Args:
        stacks: Rank -> its stack; None if it did not answer.
        node_of: Rank -> its node.
    """
    waiting: dict[str, list[int]] = {}
    suspects = []
    for rank, stack in sorted(stacks.items()):
        if stack and (collective := waiting_in(stack)):
            waiting.setdefault(collective, []).append(rank)
        else:
            suspects.append(f"rank {rank} on {node_of[rank]} {'is in none' if stack else 'does not answer'}")
    said = [f"{_ranks(ranks)} in {collective}" for collective, ranks in waiting.items()]
    return "; ".join([*said, *suspects])


def _list_of(behind: Mapping[int, Position]) -> str:
    return ", ".join(f"rank {rank} is still in {_name(position)}" for rank, position in sorted(behind.items()))


def _fewest(positions: Mapping[int, Position]) -> str:
    """Return the ranks that passed fewer marks than others, if any."""
    least, most = (choose(position.marks for position in positions.values()) for choose in (min, max))
    slowest = [rank for rank, position in sorted(positions.items()) if position.marks == least]
    return f"; {_ranks(slowest)} after {least} marks, others after up to {most}" if least < most else ""


def _name(position: Position) -> str:
    return f"phase {position.phase} of step {position.step + 1}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

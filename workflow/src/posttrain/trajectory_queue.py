"""The queue of trajectory groups between engines and trainer: which groups may start, and which a step trains on.

Bookkeeping only, without engines, files or clocks: `rl.rollout.generator` drives it with requests, and
`plan.timing.async_simulation` on a virtual clock. A group is known by its position in the run's order of prompts:
0, 1, 2, ...

Two rules bound a group's staleness: the number of updates between the oldest weights that sampled it and the weights
that train on it. B is the number of groups of a step, k the bound.

- A group starts while fewer than (v + 1) B + A groups have started, where v is the engines' weight version. A is k B if
  engines run ahead, and `rollout.tail_fraction` x B if they take turns with the trainer. Dropped groups do not count.
- Step v + k is the last that may train on a group of version v. A step takes as many groups of each age as later steps
  could not take in time, and waits for those; the rest of its batch are the groups that were ready first.

So no group is ever too old, and none is generated in vain. With A = k B the first rule is AReaL's (arXiv:2505.24298,
equation 3); the second makes the bound strict for every group. With k = 0 they give the synchronous step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from posttrain.config.derived import takes_turns
from posttrain.config.schema import Config


class _OfVersion:
    """The groups between start and training whose oldest weight version is the same."""

    def __init__(self) -> None:
        self.num_waiting = 0
        # Position -> place in the order in which groups became ready.
        self.ready: dict[int, int] = {}


def groups_of_tail(tail_fraction: float, batch_size: int) -> int:
    """Return how many groups a step leaves to the next one, at most."""
    return math.ceil(tail_fraction * batch_size)


class TrajectoryQueue:
    """The state of the queue.

    Args:
        batch_size: B, groups of a step.
        max_staleness: k, in updates.
        num_steps: Steps of the run; no group starts that none would train on.
        finished: Finished steps; the weight version that the engines have.
        done: Positions that finished and reserved steps trained on or dropped: all below the first number, and those of
            the list.
        max_dropped: Most groups dropped for one step.
        num_ahead: A, most groups started beyond those of the next step; k B by default.
        expected_length: Of the responses at a position. Of the groups that may start, the longest starts first; by
            default the one whose position is lowest.

    Raises:
        ValueError: A is above k B: some groups would get too old before a step could take them.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        num_steps: int,
        finished: int = 0,
        done: tuple[int, Collection[int]] = (0, ()),
        max_dropped: int = 0,
        num_ahead: int | None = None,
        expected_length: Callable[[int], float] | None = None,
    ):
        self._batch_size, self._max_staleness, self._num_steps = batch_size, max_staleness, num_steps
        self._max_dropped = max_dropped
        self._num_ahead = max_staleness * batch_size if num_ahead is None else num_ahead
        if self._num_ahead > max_staleness * batch_size:
            raise ValueError(f"num_ahead={num_ahead} is above max_staleness x batch_size")
        self.version = finished
        self._first_open, self._done = done[0], set(done[1])
        self._next = self._first_open
        self._startable, self._expected_length = list[int](), expected_length
        self._num_trained = finished * batch_size
        self._waiting: dict[int, int] = {}  # position -> the oldest version that has sampled the group, or may do so
        self._of_version = defaultdict[int, _OfVersion](_OfVersion)
        self._reserved: dict[int, list[int]] = {}
        self._num_running = self._num_ready_ever = 0
        self._dropped: Counter[str] = Counter()

    @staticmethod
    def of(
        config: Config,
        finished: int = 0,
        done: tuple[int, Collection[int]] = (0, ()),
        expected_length: Callable[[int], float] | None = None,
    ) -> TrajectoryQueue:
        """Return the queue of a run after `finished` steps."""
        rollout = config.rollout
        size, most = rollout.rollout_batch_size, rollout.max_oversampling if rollout.dynamic_sampling else 1.0
        num_ahead = groups_of_tail(rollout.tail_fraction, size) if takes_turns(config) else None
        max_dropped = int((most - 1) * size)
        past = expected_length if rollout.longest_first else None
        return TrajectoryQueue(
            size, rollout.max_staleness, config.training.num_steps, finished, done, max_dropped, num_ahead, past
        )

    def may_drop(self, reason: str) -> bool:
        """Return whether one more group may be dropped for a reason, for the next step."""
        return self._dropped[reason] < self._max_dropped

    def num_dropped(self, reason: str) -> int:
        """Return how many groups were dropped for a reason since the last step."""
        return self._dropped[reason]

    @property
    def state(self) -> dict[str, float]:
        """Metrics of the queue, just before a step takes its groups."""
        return {
            "queue/groups_ready": len(self._waiting) - self._num_running,
            "queue/groups_running": self._num_running,
            **{f"queue/dropped_{reason}": count for reason, count in self._dropped.items()},
        }

    @property
    def done(self) -> tuple[int, list[int]]:
        """The positions trained on or dropped: all below the first number, and those of the list."""
        while self._first_open in self._done:
            self._done.remove(self._first_open)
            self._first_open += 1
        return self._first_open, sorted(self._done)

    def is_open(self, position: int) -> bool:
        """Return whether no step has trained on a position or dropped it, or will do so by `reserve`."""
        is_taken = position < self._first_open or position in self._done
        return not is_taken and not any(position in positions for positions in self._reserved.values())

    def reserve(self, step: int, positions: Sequence[int]) -> None:
        """Note that a step has to train on these positions, because it did so before the run resumed."""
        self._reserved[step] = [*positions]

    def is_reserved(self, step: int) -> bool:
        """Return whether a step trains on what it trained on before the run resumed."""
        return step in self._reserved

    def start(self) -> int | None:
        """Start the next group with the engines' weights; returns its position, None if no group may start now."""
        num_reserved = sum(map(len, self._reserved.values()))
        most = min((self.version + 1) * self._batch_size + self._num_ahead, self._num_steps * self._batch_size)
        num_free = most - self._num_trained - num_reserved - len(self._waiting)
        if num_free <= 0:
            return None
        while len(self._startable) < num_free:
            if self._next not in self._waiting and self.is_open(self._next):
                self._startable.append(self._next)
            self._next += 1
        longest = self._longest_of_batch() if self._expected_length else self._startable[0]
        self._startable.remove(longest)
        self._waiting[longest] = self.version
        self._of_version[self.version].num_waiting += 1
        self._num_running += 1
        return longest

    def _longest_of_batch(self) -> int:
        """Return the startable position with the longest expected response, of the first batch that has any.

        Across batches the shortest groups would never start, because each update adds longer ones.
        """
        assert self._expected_length
        batch = self._startable[0] // self._batch_size
        of_batch = [place for place in self._startable[: self._batch_size] if place // self._batch_size == batch]
        return max(of_batch, key=self._expected_length)

    def add_ready(self, position: int, oldest_version: int) -> None:
        """Note that a group is ready: one that was started, or one that an earlier attempt has stored."""
        assert self.is_open(position), f"the group at position {position} was trained on already"
        self._num_running -= position in self._waiting
        self._remove(position)
        self._waiting[position] = oldest_version
        self._of_version[oldest_version].num_waiting += 1
        self._of_version[oldest_version].ready[position] = self._num_ready_ever
        self._num_ready_ever += 1

    def drop(self, position: int, reason: str) -> None:
        """Drop a group; another may start in its place."""
        self._remove(position)
        self._num_running -= 1
        self._done.add(position)
        self._dropped[reason] += 1

    def choose(self, step: int) -> list[int] | None:
        """Return the positions that a step trains on, in order; None while it has to wait for one.

        Raises:
            RuntimeError: A group is older than the bound allows.
        """
        if step in self._reserved:
            return self._reserved[step]
        shares = self._shares(step)
        if shares is None:
            return None
        order, chosen, others = dict[int, int](), list[int](), list[int]()
        for version, share in shares:
            order |= self._of_version[version].ready
            others = sorted([*others, *self._of_version[version].ready], key=order.__getitem__)
            missing = share - len(chosen)
            chosen, others = chosen + others[:missing], others[missing:]
        return sorted(chosen + others[: self._batch_size - len(chosen)])

    def _shares(self, step: int) -> list[tuple[int, int]] | None:
        """Return each version, oldest first, with how many groups up to it a step has to take; None if it has to wait.

        Counts alone, since a step that waits asks after each group that becomes ready.
        """
        shares, num_waiting, num_ready, share = list[tuple[int, int]](), 0, 0, 0
        for version in sorted(self._of_version):
            last_step = version + self._max_staleness
            if last_step < step:
                old = [position for position, oldest in self._waiting.items() if oldest == version]
                raise RuntimeError(f"step {step + 1}: groups {old[:5]} are more than {self._max_staleness} updates old")
            num_waiting += self._of_version[version].num_waiting
            num_ready += len(self._of_version[version].ready)
            share = max(share, num_waiting - (last_step - step) * self._batch_size)
            if share > num_ready:
                return None
            shares.append((version, share))
        return shares if num_ready >= self._batch_size else None

    def _remove(self, position: int) -> None:
        """Forget a group that waits, if it does."""
        version = self._waiting.pop(position, None)
        if version is None:
            return
        groups = self._of_version[version]
        groups.num_waiting -= 1
        groups.ready.pop(position, None)
        if not groups.num_waiting:
            del self._of_version[version]

    def take(self, step: int, positions: Sequence[int]) -> None:
        """Remove the groups of a step, which trains on them."""
        self._reserved.pop(step, None)
        for position in positions:
            self._remove(position)
            if position >= self._first_open:
                self._done.add(position)
        self._num_trained += len(positions)
        self._dropped.clear()

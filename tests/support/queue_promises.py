"""What the files of a training whose groups pass through a queue promise, whatever is killed."""

from __future__ import annotations

from pathlib import Path

from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import Trajectory, TrajectoryGroup


def check_whole(one: Trajectory) -> None:
    """A trajectory has a version for each sampled token and a reward, or failed and has none."""
    assert sum(span.num_tokens for span in one.versions) == one.num_sampled == len(one.logprobs)
    assert (one.reward is None) == bool(one.failure)
    if "episode/turns" in one.parts and one.reward is not None:
        assert one.finish_reason == "length" or one.parts["episode/turns"] in (2, 3), "half an episode"


class Promises:
    """What a training's files have promised after its kills.

    Args:
        run: Its folder.
        num_steps: Of the training.
        shape: Groups of a step, and trajectories of a group.
    """

    def __init__(self, run: Path, num_steps: int, shape: tuple[int, int]):
        self._store, self._num_steps, self._shape = QueueStore(run / "rollouts"), num_steps, shape
        self._promised, self._taken = dict[int, TrajectoryGroup](), dict[int, list[TrajectoryGroup]]()

    def note_files(self) -> None:
        """Note groups that are finished and those that steps have; what was noted before is unchanged."""
        for step in range(self._num_steps):
            if (groups := self._store.read(step, 0)) is not None:
                assert self._taken.setdefault(step, groups) == groups, f"step {step} has other groups than before"
        known = {group.position: group for group in self._store.read_groups()}
        known |= {group.position: group for groups in self._taken.values() for group in groups}
        for position, group in self._promised.items():
            assert known.get(position) == group, f"the group at position {position} was stored, and is lost"
        self._promised |= known

    def check(self, steps: list[list[TrajectoryGroup]], max_staleness: int, may_drop: bool) -> None:
        """Check what the whole training promises."""
        self.note_files()
        num_groups, size = self._shape
        for step, groups in enumerate(steps):
            assert [len(group.trajectories) for group in groups] == [size] * num_groups
            for one in (one for group in groups for one in group.trajectories):
                check_whole(one)
                assert all(0 <= step - (span.version or 0) <= max_staleness for span in one.versions)
        by_position = {group.position: group for groups in steps for group in groups}
        assert len(by_position) == num_groups * self._num_steps, "a group was trained on twice"
        first_open, others = self._store.read_done(self._num_steps)
        accounted, every = {*range(first_open), *others}, {*range(num_groups * self._num_steps)}
        assert accounted >= {*by_position}
        assert may_drop or accounted == {*by_position} == every, "a position is left out"
        for position, group in self._promised.items():
            # What is finished for later steps stays when the last one ends.
            assert by_position.get(position, group) == group
            assert position in by_position or position not in accounted, f"position {position} was stored, and dropped"

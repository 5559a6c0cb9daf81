"""The queue: no group is ever too old, trained on twice, lost or generated in vain."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

import pytest

from posttrain.trajectory_queue import TrajectoryQueue

B, STEPS = 4, 12


def run(
    max_staleness: int,
    seed: int = 0,
    drop: float = 0.0,
    max_dropped: int = 0,
    update: float = 1.0,
    tail: int | None = None,
) -> tuple[list[list[int]], list[list[int]], TrajectoryQueue, float]:
    """Drive a queue on a virtual clock: groups take log-normal times, every update takes `update`.

    With a `tail` engines and trainer take turns: running groups stand still during an update, at most `tail` of them.

    Returns:
        Positions and staleness of each step's groups, the queue, and the time at the end.
    """
    draw = random.Random(seed)
    queue = TrajectoryQueue(B, max_staleness, STEPS, max_dropped=max_dropped, num_ahead=tail)
    running: list[tuple[float, int]] = []
    started: dict[int, int] = {}
    taken: list[list[int]] = []
    staleness: list[list[int]] = []
    now, trains_until = 0.0, 0.0

    def fill() -> None:
        while (position := queue.start()) is not None:
            assert position not in started
            started[position] = queue.version
            heapq.heappush(running, (now + draw.lognormvariate(0, 1), position))

    fill()
    while len(taken) < STEPS:
        step = len(taken)
        if now >= trains_until and (chosen := queue.choose(step)) is not None:
            queue.take(step, chosen)
            taken.append(chosen)
            staleness.append([step - started[position] for position in chosen])
            trains_until = now + update
            if tail is None:
                fill()
                continue
            assert len(running) <= tail, "more groups wait for the update than the tail may have"
            running[:] = [(end + update, position) for end, position in running]
            now, queue.version = trains_until, len(taken)
            fill()
            continue
        ends = running[0][0] if running else float("inf")
        if trains_until > now and trains_until <= ends:
            now = trains_until
            queue.version = len(taken)
        else:
            now, position = heapq.heappop(running)
            if draw.random() < drop and queue.may_drop("equal_rewards"):
                queue.drop(position, "equal_rewards")
            else:
                queue.add_ready(position, started[position])
        fill()
    assert not running, "groups were generated that no step trains on"
    return taken, staleness, queue, now


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 11])
@pytest.mark.parametrize("seed", range(20))
def test_every_group_is_trained_on_once_and_none_is_too_old(max_staleness: int, seed: int) -> None:
    """Whatever the times of the groups are, each step gets B groups, and the bound holds for each of them."""
    taken, staleness, queue, _ = run(max_staleness, seed)
    positions = [position for step in taken for position in step]
    assert sorted(positions) == list(range(B * STEPS))
    assert all(len(step) == B and step == sorted(step) for step in taken)
    assert all(0 <= age <= max_staleness for step in staleness for age in step)
    assert queue.done == (B * STEPS, [])


@pytest.mark.parametrize("tail", [1, 2, B])
@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_tail_is_left_to_later_steps(max_staleness: int, tail: int, seed: int) -> None:
    """Engines and trainer take turns, and a step does not wait for its last groups unless they would get too old."""
    taken, staleness, queue, ends = run(max_staleness, seed, tail=tail)
    assert sorted(position for step in taken for position in step) == list(range(B * STEPS))
    assert all(0 <= age <= max_staleness for step in staleness for age in step)
    assert any(age for step in staleness for age in step)
    assert queue.done == (B * STEPS, [])
    assert ends > STEPS, "updates take this long alone"


def test_a_tail_saves_time() -> None:
    """Half a batch left to the next step: most of what a step waits for its slowest groups is saved."""
    waits, shorter = (sum(run(k, seed, tail=tail)[3] - STEPS for seed in range(20)) for k, tail in ((0, 0), (2, 2)))
    assert shorter < 0.75 * waits


def test_without_staleness_a_step_trains_on_its_own_prompts() -> None:
    """k = 0 is the synchronous step: the groups of a step start after the update before, in the order of prompts."""
    taken, staleness, *_ = run(0)
    assert taken == [list(range(step * B, (step + 1) * B)) for step in range(STEPS)]
    assert {age for step in staleness for age in step} == {0}


def seconds_in_places(lengths: list[float], max_staleness: int, expected: Callable[[int], float] | None) -> float:
    """Return the time of steps without updates, on engines with places for five groups."""
    queue = TrajectoryQueue(16, max_staleness, STEPS, expected_length=expected)
    now, running, steps, seen = 0.0, list[tuple[float, int]](), list[list[int]](), set[int]()
    while len(steps) < STEPS:
        while len(running) < 5 and (position := queue.start()) is not None:
            assert position not in seen
            seen.add(position)
            heapq.heappush(running, (now + lengths[position], position))
        now, position = heapq.heappop(running)
        queue.add_ready(position, queue.version)
        while len(steps) < STEPS and (chosen := queue.choose(len(steps))) is not None:
            queue.take(len(steps), chosen)
            steps.append(chosen)
            queue.version = len(steps)
    assert sorted(position for step in steps for position in step) == list(range(16 * STEPS))
    return now


@pytest.mark.parametrize(("max_staleness", "most"), [(0, 0.9), (1, 1.0)])
def test_longest_first_saves_time(max_staleness: int, most: float) -> None:
    """The engines' places are full to the end of a step. Engines that run ahead fill them anyway, so it saves less."""
    in_order, longest_first = 0.0, 0.0
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.lognormvariate(0, 1) for _ in range(16 * STEPS)]
        in_order += seconds_in_places(lengths, max_staleness, None)
        longest_first += seconds_in_places(lengths, max_staleness, lengths.__getitem__)
    assert longest_first < most * in_order, f"{longest_first / in_order:.2f}"


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_short_groups_are_not_left_behind(max_staleness: int) -> None:
    """Each update adds positions with longer responses; the shortest ones of earlier batches start before them."""
    draw, num_steps, size = random.Random(0), 200, 8
    lengths = [draw.lognormvariate(0, 1) for _ in range(size * num_steps)]
    queue = TrajectoryQueue(size, max_staleness, num_steps, expected_length=lengths.__getitem__)
    now, running, step = 0.0, list[tuple[float, int]](), 0
    while step < num_steps:
        while len(running) < 4 and (position := queue.start()) is not None:
            heapq.heappush(running, (now + lengths[position], position))
        now, position = heapq.heappop(running)
        queue.add_ready(position, queue.version)
        while step < num_steps and (chosen := queue.choose(step)) is not None:
            assert all(step - position // size <= max_staleness + 2 for position in chosen)
            queue.take(step, chosen)
            step = queue.version = step + 1
            assert len(queue.done[1]) <= (max_staleness + 2) * size


def test_a_run_that_resumes_without_lengths_leaves_no_position_out() -> None:
    """Longest first, trained positions have gaps between them; another attempt starts what lies in the gaps."""
    has_gaps = False
    for seed in range(10):
        draw, trained, done = random.Random(seed), list[int](), (0, list[int]())
        lengths = [draw.lognormvariate(0, 1) for _ in range(B * STEPS)]
        for first, last, expected in ((0, 2, lengths.__getitem__), (2, STEPS, None)):
            queue, running = (
                TrajectoryQueue(B, 2, STEPS, first, done, expected_length=expected),
                list[tuple[int, int]](),
            )
            for step in range(first, last):
                queue.version = step
                while (chosen := queue.choose(step)) is None:
                    while (position := queue.start()) is not None:
                        running.append((position, step))
                    queue.add_ready(*running.pop(draw.randrange(len(running))))
                queue.take(step, chosen)
                trained += chosen
            done = queue.done
            has_gaps |= bool(done[1])
        assert sorted(trained) == list(range(B * STEPS))
        assert done == (B * STEPS, [])
    assert has_gaps


def test_the_bound_is_reached() -> None:
    """Engines run ahead as far as they may: with slow updates every later group is k updates old."""
    *_, staleness, _, _ = run(2, update=100.0)
    assert all(age == 2 for step in staleness[3:] for age in step)


@pytest.mark.parametrize("seed", range(5))
def test_smaller_steps_start_their_updates_earlier(seed: int) -> None:
    """Half the batch and twice the bound: as many groups run ahead, and the first update needs half of them."""
    first_updates = []
    for size, bound in ((8, 1), (4, 2)):
        queue, draw = TrajectoryQueue(size, bound, 64 // size), random.Random(seed)
        ends = list[tuple[float, int]]()
        while (position := queue.start()) is not None:
            ends.append((draw.lognormvariate(0, 1), position))
        assert len(ends) >= 12
        for now, position in sorted(ends):
            queue.add_ready(position, 0)
            if queue.choose(0) is not None:
                first_updates.append(now)
                break
    assert first_updates[1] < first_updates[0]


def test_staleness_saves_time() -> None:
    """With updates as long as a rollout's tail, one step off takes less time than the synchronous steps."""
    times = [run(k, seed=3, update=3.0)[-1] for k in (0, 1, 4)]
    assert times[0] > 1.3 * times[1] > times[2]


@pytest.mark.parametrize("seed", range(10))
def test_dropped_groups_are_replaced(seed: int) -> None:
    """Each step still gets B groups; a step drops no more than its limit."""
    taken, staleness, queue, _ = run(1, seed, drop=0.5, max_dropped=B)
    positions = [position for step in taken for position in step]
    assert len({*positions}) == B * STEPS
    first_open, others = queue.done
    assert first_open + len(others) <= 2 * B * STEPS
    assert all(age <= 1 for step in staleness for age in step)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_each_group_is_trained_on_or_dropped(max_staleness: int, seed: int) -> None:
    """Dynamic sampling makes no surplus: what is ready when a step has its batch stays for the next ones."""
    taken, _, queue, _ = run(max_staleness, seed, drop=0.5, max_dropped=B)
    assert queue.state["queue/groups_ready"] == queue.state["queue/groups_running"] == 0
    first_open, others = queue.done
    dropped = {*range(first_open), *others} - {position for step in taken for position in step}
    assert len(dropped) <= B * STEPS
    assert (first_open, others) == (B * STEPS + len(dropped), []), "a position is left out"


def test_groups_that_are_ready_too_early_wait_for_the_next_step() -> None:
    """Also those that became ready after the step had its batch."""
    queue = TrajectoryQueue(B, 1, STEPS)
    started = []
    while (position := queue.start()) is not None:
        started.append(position)
    for position in reversed(started):
        queue.add_ready(position, 0)
    chosen = queue.choose(0)
    assert chosen == started[B:]
    queue.take(0, chosen)
    assert queue.state["queue/groups_ready"] == B
    queue.version = 1
    assert queue.choose(1) == started[:B]


def test_groups_of_an_older_attempt_are_taken_again_in_their_steps() -> None:
    """A run that resumes at an older checkpoint replays the steps that had taken their groups."""
    queue = TrajectoryQueue(B, 1, STEPS, finished=3, done=(B * 3 - 1, [B * 3 + 1]))
    queue.reserve(3, [B * 3 - 1, 12, 14, 15])
    queue.add_ready(17, oldest_version=3)
    assert [queue.is_open(position) for position in (13, 14, 16)] == [False, False, True]
    # Version 3 may start groups up to (3 + 1 + 1) B; 3 B are trained on, four are reserved and one is ready.
    started = []
    while (position := queue.start()) is not None:
        started.append(position)
    assert started == [16, 18, 19]
    assert queue.is_reserved(3)
    assert queue.choose(3) == [B * 3 - 1, 12, 14, 15]
    queue.take(3, [B * 3 - 1, 12, 14, 15])
    queue.version = 4
    assert queue.start() == 20
    assert queue.choose(4) is None  # waits for the three of version 3
    for position in (16, 18, 19):
        queue.add_ready(position, 3)
    assert queue.choose(4) == [16, 17, 18, 19]


def test_a_group_that_is_too_old_stops_the_run() -> None:
    """The bound is asserted for each group that waits, also for one that was read from disk."""
    queue = TrajectoryQueue(B, 1, STEPS, finished=3, done=(12, []))
    queue.add_ready(12, oldest_version=1)
    with pytest.raises(RuntimeError, match="more than 1 updates old"):
        queue.choose(3)


def test_ten_thousand_groups_take_little_time() -> None:
    """Starting, queueing and taking a group costs microseconds, however many wait; so does asking in vain."""
    count = 10_000
    queue = TrajectoryQueue(count // 5, 4, 5)
    began = time.process_time()
    while (position := queue.start()) is not None:
        pass
    for position in range(count):
        queue.add_ready(position, 0)
        assert position + 1 >= count // 5 or queue.choose(0) is None
    for step in range(5):
        queue.version = step
        chosen = queue.choose(step)
        assert chosen is not None
        queue.take(step, chosen)
    assert (time.process_time() - began) / count < 2e-4

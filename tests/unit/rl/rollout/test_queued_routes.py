"""Expert routes of groups that pass through a queue."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.rejections import rejected
from tests.support.scripted_engines import DIGIT, RoutedEngine, layout_of_tiny, routes_of
from tests.support.scripted_environments import ScriptedEnvironments

from posttrain.rl.batching.stored_routes import open_routes
from posttrain.rl.rollout import rollout_store
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import Trajectory, TrajectoryGroup

REPLAY = {"algorithm__routing_replay": "true"}
IN_ENVIRONMENT = {"data__environment": "calculator", "data__reward": "environment", "rollout__max_response_tokens": 60}


class InterruptedEngine(RoutedEngine):
    """Aborts every other request after a token, every fourth one before it."""

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        return (([DIGIT], "stop"), ([DIGIT], "abort"), ([DIGIT], "stop"), ([], "abort"))[len(self.asked) % 4]


def check_routes(engine: RoutedEngine, trajectory: Trajectory, folder: Path) -> None:
    """Each segment has the routes that its last request reported, in a file of this folder."""
    assert len(trajectory.segments()) == len(trajectory.routes)
    for segment, routes in zip(trajectory.segments(), trajectory.routes, strict=True):
        assert Path(routes.file).parent == folder
        stored, first = open_routes(routes).transpose(1, 0, 2), layout_of_tiny().first
        # An engine answers with one token at last, so that request has read all others.
        last = [body for body in engine.asked if tuple(body["input_ids"][0]) == segment.tokens[:-1]]
        seeds = [body["sampling_params"][0]["sampling_seed"] for body in last]
        assert any((stored == routes_of(seed, segment.num_tokens - 1)[:, first:]).all() for seed in seeds)


def test_interrupted_responses_have_the_routes_of_their_last_request(play: Callable[..., None], tmp_path: Path) -> None:
    """It has read all earlier tokens again; also in a run that goes on with what is in the queue."""
    engine, step, sampled = InterruptedEngine(), tmp_path / "rollouts/step_000000", set[int]()

    def checked(groups: list[TrajectoryGroup], folder: Path) -> None:
        for one in (trajectory for group in groups for trajectory in group.trajectories):
            check_routes(engine, one, folder)
            sampled.add(one.num_sampled)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        checked((await generator.collect(0)).groups, step)

    async def again(generator: TrajectoryGenerator, store: QueueStore) -> None:
        waiting = [*store.read_groups()]
        assert waiting
        checked(waiting, tmp_path / "rollouts/queue")
        await generator.begin(0)
        replayed = await generator.collect(0)
        assert replayed.num_replayed == 2
        checked(replayed.groups, step)
        await generator.resume(1)
        checked((await generator.collect(1)).groups, tmp_path / "rollouts/step_000001")

    play(story, engine, **REPLAY)
    play(again, engine, **REPLAY)
    assert max(sampled) > 1, "no response was interrupted"


@pytest.mark.parametrize("history", ["keep", "template"])
def test_each_segment_of_an_episode_has_the_routes_of_its_last_turn(
    play: Callable[..., None], tmp_path: Path, history: str
) -> None:
    engine = RoutedEngine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        for one in (trajectory for group in (await generator.collect(0)).groups for trajectory in group.trajectories):
            check_routes(engine, one, tmp_path / "rollouts/step_000000")

    play(story, engine, environments=ScriptedEnvironments(), environment__history=history, **REPLAY, **IN_ENVIRONMENT)


def test_routes_without_their_group_are_deleted_and_damaged_ones_are_named(
    play: Callable[..., None], tmp_path: Path
) -> None:
    engine, queue = RoutedEngine(), tmp_path / "rollouts/queue"

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        await generator.collect(0)
        await generator.resume(1)
        await generator.collect(1)
        while len([*queue.glob("group_*.json")]) < 2:  # engines run ahead
            await asyncio.sleep(0.01)

    play(story, engine, **REPLAY)
    store = QueueStore(tmp_path / "rollouts")
    first, second, *_ = sorted(queue.glob("*.routes"))
    first.with_suffix(".json").unlink()
    assert second.stem in {f"group_{group.position:08d}" for group in store.read_groups()}
    assert not first.exists()
    content = bytearray(second.read_bytes())
    content[3] ^= 1
    second.write_bytes(content)
    with rejected("rollout-invalid", second.name):
        list(store.read_groups())


def test_a_step_takes_routes_where_nothing_can_be_linked_and_reads_none(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied then. A group of this attempt is not read again to check it: a step has gigabytes."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    def read(_: object) -> None:
        raise AssertionError("routes are read")

    engine, step = RoutedEngine(), tmp_path / "rollouts/step_000000"

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refuse)
            patch.setattr(rollout_store, "open_routes", read)
            groups = (await generator.collect(0)).groups
        for one in (trajectory for group in groups for trajectory in group.trajectories):
            check_routes(engine, one, step)

    play(story, engine, **REPLAY)

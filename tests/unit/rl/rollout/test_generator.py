"""Groups ahead of the trainer: what is asked of the engines, what is kept, and what happens when one fails."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.scripted_engines import DIGIT, Engine, HoldingEngine

from posttrain.errors import CheckpointError
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import VersionSpan

TURNS = {"engine__sleep": "always", "rollout__tail_fraction": 0.5, "rollout__on_new_weights": "abort"}


class AbortingEngine(Engine):
    """Aborts its first request after two tokens and, when it is asked for the rest, before the next one."""

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        rest = [one for one in self.asked if one["sampling_params"][0]["max_new_tokens"] == 4]
        if len(self.asked) == 1:
            return [DIGIT, DIGIT], "abort"
        return ([], "abort") if body in rest and len(rest) == 1 else ([DIGIT], "stop")


class SlowEngine(Engine):
    """Answers `num_fast` requests at once, and the others with a token when all are aborted."""

    def __init__(self, num_fast: int):
        super().__init__()
        self.num_fast, self.num_seen, self.num_waiting = num_fast, 0, 0
        self.aborted = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        self.num_seen += 1
        if self.num_seen > self.num_fast:
            self.num_waiting += 1
            await self.aborted.wait()
            self.num_waiting -= 1
            self.answers.append(([DIGIT], "abort"))
        return await super().generate(request)

    async def other(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            self.aborted.set()
            self.aborted = asyncio.Event()
        return await super().other(request)


def seed_of(position: int, prompt: int, index: int, attempt: int) -> int:
    name = [42, f"position {position}", prompt, index, *([attempt] if attempt else [])]
    return int.from_bytes(hashlib.sha256(json.dumps(name).encode()).digest()[:4], "big") // 2


def test_an_aborted_response_goes_on_with_its_tokens(play: Callable[..., None]) -> None:
    """The rest is asked for with prompt and tokens so far, a seed of its own, and keeps each token's version."""
    engine = AbortingEngine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        await generator.resume(1)
        groups += (await generator.collect(1)).groups
        first, second, third = (
            engine.asked[0],
            *(body for body in engine.asked[1:] if body["sampling_params"][0]["max_new_tokens"] < 6),
        )
        prompt = first["input_ids"][0]
        assert second["input_ids"][0] == third["input_ids"][0] == [*prompt, DIGIT, DIGIT]
        assert second["sampling_params"][0]["max_new_tokens"] == 4
        seeds = [body["sampling_params"][0]["sampling_seed"] for body in (first, second, third)]
        ((group, joined),) = ((g, one) for g in groups for one in g.trajectories if one.num_sampled == 3)
        assert seeds == [
            seed_of(group.position, joined.prompt_id, joined.sample_index, attempt) for attempt in range(3)
        ]
        assert joined.finish_reason == "stop"
        assert [one for one in joined.versions if one.num_tokens] == [VersionSpan(0, 2), VersionSpan(0, 1)]

    play(story, engine)


def test_a_synchronous_step_samples_an_interrupted_response_again(play: Callable[..., None]) -> None:
    """A death or an abort changes neither seed nor prompt, so that a deterministic engine gives the same tokens."""
    dying, other = Engine(*[([], "die")] * 50), Engine(([DIGIT, DIGIT], "abort"))
    synchronous = {"rollout__max_staleness": 0, "algorithm__preset": "grpo", "rollout__dynamic_sampling": "true",
                   "rollout__max_oversampling": 1, "engine__num_engines": 2}  # fmt: skip

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError):
            await generator.collect(0)
        await asyncio.sleep(0.2)  # the dead engine's other requests fail, too
        await generator.resume(0)
        groups = (await generator.collect(0)).groups
        asked = [*dying.asked, *other.asked]
        assert len(asked) > 4
        assert len({json.dumps(body) for body in asked}) == 4, "each response is asked for with the same words"
        assert all(one.num_sampled == 1 for group in groups for one in group.trajectories)

    play(story, dying, other, **synchronous)


def test_an_engine_that_dies_gives_its_requests_to_the_other(play: Callable[..., None]) -> None:
    """At once; the trainer hears of it, once, and the step's groups are complete."""
    dying, other = Engine(*[([], "die")] * 50), Engine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError, match="engine 0"):
            await generator.collect(0)
        async with asyncio.timeout(10):
            while len(other.asked) < 8:  # four groups of two
                await asyncio.sleep(0.01)
        await generator.resume(0)
        assert len((await generator.collect(0)).groups) == 2

    play(story, dying, other)


def test_a_tail_is_aborted_before_the_trainer_works(play: Callable[..., None]) -> None:
    """Two of three groups are ready; the third gives its tokens back, and goes on with them in the next step."""
    engine = SlowEngine(num_fast=4)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        assert not engine.asked, "the trainer's turn"
        first = await generator.collect(0)
        assert [group.position for group in first.groups] == [0, 1]
        assert (engine.num_waiting, len(engine.asked)) == (0, 6)
        engine.version, engine.num_fast = "1", 100
        await generator.resume(1)
        await asyncio.sleep(0.05)
        assert len(engine.asked) == 6, "nothing is asked of engines that sleep"
        second = await generator.collect(1)
        assert second.groups[0].position == 2
        for trajectory in second.groups[0].trajectories:
            assert [(span.version, span.num_tokens) for span in trajectory.versions] == [(0, 1), (1, 1)]

    play(story, engine, **TURNS)


def test_engines_that_are_left_stop_when_another_dies(play: Callable[..., None]) -> None:
    """The trainer puts all engines to sleep to give them weights, so none may still run a request."""
    dying, slow = Engine(*[([], "die")] * 50), SlowEngine(num_fast=0)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError):
            await generator.collect(0)
        assert slow.num_waiting == 0
        await asyncio.sleep(0.2)  # the dead engine's other requests fail, too
        slow.num_fast = 100
        await generator.resume(0)
        assert len((await generator.collect(0)).groups) == 2, "one death is told once"

    play(story, dying, slow, engine__num_engines=2, **TURNS)


def test_responses_that_have_ended_leave_their_places_to_others(play: Callable[..., None]) -> None:
    """Two groups of two have the engine's four places; each waits for one response, and a third takes the others'."""
    engine = HoldingEngine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        async with asyncio.timeout(10):
            while len(engine.asked) < 6:
                await asyncio.sleep(0.01)
        assert not engine.released.is_set()
        engine.released.set()
        assert len((await generator.collect(0)).groups) == 4

    play(story, engine, rollout__rollout_batch_size=4, training__global_batch_size=8, engine__max_running_requests=4)


def test_a_step_is_on_disk_before_it_is_trained_on(play: Callable[..., None]) -> None:
    """Finished groups wait as files; the step takes them by one rename, and a second attempt takes the same."""

    engine = Engine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        rollout = await generator.collect(0)
        assert store.read_step(0, 2) == rollout.groups
        first_open, others = store.read_done(1)
        assert {*range(first_open), *others} == {group.position for group in rollout.groups}
        engine.version = "1"
        await generator.resume(1)
        second = await generator.collect(1)
        waiting = {group.position for group in store.read_groups()}
        assert not waiting & {group.position for group in (*rollout.groups, *second.groups)}

    async def again(generator: TrajectoryGenerator, store: QueueStore) -> None:
        kept = [store.read_step(step, 2) for step in (0, 1)]
        await generator.begin(0)
        for step in (0, 1):
            replayed = await generator.collect(step)
            assert (replayed.groups, replayed.num_replayed) == (kept[step], 2)
            engine.version = str(step + 1)
            await generator.resume(step + 1)
        third = await generator.collect(2)
        positions = [group.position for groups in (*kept, third.groups) for group in groups]
        assert len({*positions}) == 6

    play(story, engine)
    engine.version = "0"
    play(again, engine)


def test_versions_that_the_engines_cannot_have_end_the_run(play: Callable[..., None]) -> None:
    """A token of a later version than the trainer published is from weights that nobody knows."""
    engine = Engine()
    engine.version = "9"

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(RuntimeError, match="'9'"):
            await generator.collect(0)
        assert not [*store.read_groups()], "a later attempt would train on it"

    play(story, engine)


def test_a_version_that_is_not_known_ends_the_run(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client numbers the initial weights; the generator takes no unknown version for 0."""
    engine = Engine()
    engine.version = "default"

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        assert {span.version for group in groups for one in group.trajectories for span in one.versions} == {0}

    async def unknown(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(RuntimeError, match="'None'"):
            await generator.collect(0)

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.rl.engines.client.of_first_weights", lambda result: result)
        play(unknown, engine)
    play(story, engine)


def test_a_request_that_an_engine_refuses_waits_for_the_trainer(play: Callable[..., None]) -> None:
    """An engine that answers is not left out, so the same request would fail again and again."""
    engine = Engine(*[([DIGIT] * 7, "stop")] * 8)  # more tokens than asked for

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError, match="engine 0"):
            await generator.collect(0)
        await asyncio.sleep(0.2)
        assert len(engine.asked) == 8  # one for each response that may run
        await generator.resume(0)
        assert len((await generator.collect(0)).groups) == 2

    play(story, engine)


def test_a_group_of_weights_that_are_lost_is_generated_again(play: Callable[..., None], tmp_path: Path) -> None:
    """A step's files were removed, so the weights after it will be others."""
    engine = Engine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        await generator.collect(0)
        engine.version = "1"
        await generator.resume(1)
        await generator.collect(1)
        while not (groups := [*store.read_groups()]):
            await asyncio.sleep(0.01)
        assert {group.oldest_version for group in groups} == {1}

    async def again(generator: TrajectoryGenerator, store: QueueStore) -> None:
        kept = [group.position for group in store.read_groups()]
        await generator.begin(0)
        assert not {*kept} & {group.position for group in store.read_groups()}

    play(story, engine)
    engine.version = "0"
    for folder in (tmp_path / "rollouts").glob("step_*"):
        shutil.rmtree(folder)
    play(again, engine)


def test_what_was_dropped_for_a_step_stays_dropped(play: Callable[..., None]) -> None:
    """Else a later attempt generates and stores it, and one that begins after the step deletes it."""
    sampling = {"rollout__dynamic_sampling": "true", "rollout__max_oversampling": 2}
    used = set[int]()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        trained = {group.position for group in (await generator.collect(0)).groups}
        first_open, others = store.read_done(1)
        used.update(range(first_open), others)
        assert (len(trained), len(used - trained)) == (2, 2)

    async def again(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        assert (await generator.collect(0)).num_replayed == 2
        await generator.resume(1)
        second = {group.position for group in (await generator.collect(1)).groups}
        first_open, others = store.read_done(2)
        assert not second & used
        assert used | second <= {*range(first_open), *others}

    play(story, Engine(), **sampling)
    play(again, Engine(), **sampling)


def test_a_run_without_its_record_is_refused(play: Callable[..., None]) -> None:
    """Without the positions that finished steps have trained on, prompts could be trained on twice."""

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        with pytest.raises(CheckpointError) as caught:
            await generator.begin(2)
        assert caught.value.code == "rollout-invalid"

    play(story, Engine())

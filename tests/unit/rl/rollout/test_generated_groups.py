"""Groups ahead of the trainer: rewards of whole groups, graders that take their time, engines that die half way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.scripted_engines import DIGIT, Engine
from tests.unit.rl.rollout.test_generator import TURNS, SlowEngine, seed_of

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import TrajectoryGroup, VersionSpan

LONGEST_OF_TWO = """
def longest(prompts, completions, **columns):
    lengths = [len(completion[0]["content"]) for completion in completions]
    assert len(lengths) == 2
    return [float(length == max(lengths)) for length in lengths]
"""
WAITS_FOR_FILE = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while not pathlib.Path({path!r}).exists():
        time.sleep(0.01)
    return 1.0
"""


class RestOfTwoLengths(SlowEngine):
    """Continues aborted responses with two tokens and with one."""

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        if body["sampling_params"][0]["max_new_tokens"] == 5 and not self.answers:
            self.answers = [([DIGIT] * 2, "stop"), ([DIGIT], "stop")]
        return super().answer(body)


def test_a_reward_of_whole_groups_sees_the_groups_of_a_tail(play: Callable[..., None], tmp_path: Path) -> None:
    """Groups are graded when their last response ends, so the reward never sees a part of one."""
    (tmp_path / "own.py").write_text(LONGEST_OF_TWO)
    engine = RestOfTwoLengths(num_fast=4)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        await generator.collect(0)
        engine.version, engine.num_fast = "1", 100
        await generator.resume(1)
        tail = (await generator.collect(1)).groups[0].trajectories
        assert sorted((one.num_sampled, one.reward) for one in tail) == [(2, 0.0), (3, 1.0)]
        assert all(len(one.versions) == 2 for one in tail)

    play(story, engine, **TURNS, data__reward=f"{tmp_path / 'own.py'}:longest")


class TellingEngine(Engine):
    """Makes a file when it is asked for a response of a second group."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        if len(self.asked) > 2:
            self.path.touch()
        return super().answer(body)


@pytest.mark.parametrize("settings", [{}, TURNS], ids=["ahead", "tail"])
def test_a_group_is_graded_while_others_are_generated(
    play: Callable[..., None], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """One group has all places of the engine; its grader ends only once the engine works on the next one."""
    path = tmp_path / "asked"
    (tmp_path / "own.py").write_text(WAITS_FOR_FILE.format(path=str(path)))

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        assert {one.reward for group in groups for one in group.trajectories} == {1.0}

    reward = f"{tmp_path / 'own.py'}:compute_score"
    play(story, TellingEngine(path), data__reward=reward, engine__max_running_requests=2, **settings)


class EngineOfLengths(Engine):
    """Answers the prompt "say N" with a number of digits."""

    LENGTHS = (3, 1, 5, 2, 6, 1, 4, 2)

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        return [DIGIT] * self.LENGTHS[prompt_of(body)], "length"


def prompt_of(body: dict[str, Any]) -> int:
    said = [CHARACTERS[token] for token in body["input_ids"][0] if token < len(CHARACTERS)]
    return next(int(character) for character in said if character.isdigit())


def test_the_longest_groups_of_the_epoch_before_start_first(play: Callable[..., None]) -> None:
    """In the first epoch nothing is known, so groups start in order; seeds go with positions, not with the order."""
    engine = EngineOfLengths()
    shuffles = []

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        for step in range(2):
            groups = (await generator.collect(step)).groups
            assert [group.position for group in groups] == [*range(8 * step, 8 * step + 8)]
            shuffles.append([group.prompt.prompt_id for group in groups])
            engine.version = str(step + 1)
            await generator.resume(step + 1)

    settings = {"rollout__longest_first": "true", "rollout__dynamic_sampling": "true", "rollout__max_oversampling": 1}
    settings |= {"rollout__max_staleness": 0, "rollout__rollout_batch_size": 8, "training__global_batch_size": 16}
    play(story, engine, **settings, engine__max_running_requests=2)
    asked = [prompt_of(body) for body in engine.asked[::2]]
    assert asked[:8] == shuffles[0]
    assert asked[8:] == sorted(shuffles[1], key=lambda prompt: -EngineOfLengths.LENGTHS[prompt])
    for body, prompt in zip(engine.asked[16::2], asked[8:], strict=True):
        seeds = {seed_of(8 + shuffles[1].index(prompt), prompt, index, 0) for index in range(2)}
        assert body["sampling_params"][0]["sampling_seed"] in seeds


class DyingEngine(SlowEngine):
    """Gives aborted requests back with two tokens; later answers nothing."""

    logprob = -0.25

    def __init__(self, num_fast: int):
        super().__init__(num_fast)
        self.is_dead = False

    async def generate(self, request: web.Request) -> web.Response:
        if self.is_dead:
            assert request.transport
            request.transport.close()
        return await super().generate(request)

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        tokens, reason = super().answer(body)
        return tokens * (1 + (reason == "abort")), reason


async def collect_in_tries(generator: TrajectoryGenerator, step: int) -> list[TrajectoryGroup]:
    """Return a step's groups; each request of a dead engine may be the next failure."""
    for _ in range(4):
        with contextlib.suppress(EngineError):
            return (await generator.collect(step)).groups
    pytest.fail("engines fail all the time")


def test_what_a_dead_engine_gave_back_goes_on_elsewhere(play: Callable[..., None]) -> None:
    """The other engine is asked for what follows the tokens so far, which keep versions and log-probabilities."""
    dying, other = DyingEngine(num_fast=2), Engine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        await generator.collect(0)
        while not dying.num_waiting:
            await asyncio.sleep(0.01)
        await generator.pause()
        given_back = dying.asked[2:]
        dying.is_dead, other.version, before = True, "1", len(other.asked)
        await generator.resume(1)
        with pytest.raises(EngineError, match="engine 0"):
            await generator.collect(1)
        groups = await collect_in_tries(generator, 1)
        rests = [body for body in other.asked[before:] if body["sampling_params"][0]["max_new_tokens"] == 4]
        asked = [[*body["input_ids"][0], DIGIT, DIGIT] for body in given_back]
        assert sorted(body["input_ids"][0] for body in rests) == sorted(asked)
        joined = [one for group in groups for one in group.trajectories if one.num_sampled == 3]
        assert len(joined) == len(rests) > 0
        assert {one.versions for one in joined} == {(VersionSpan(0, 2), VersionSpan(1, 1))}
        assert {one.logprobs for one in joined} == {(-0.25, -0.25, -0.5)}

    settings = {"engine__num_engines": 2, "engine__max_running_requests": 2, "rollout__on_new_weights": "abort"}
    play(story, dying, other, **settings)

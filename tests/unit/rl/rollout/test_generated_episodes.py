"""Episodes in environments, in groups that a queue hands to the trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.scripted_engines import CONFIG, DIGIT, PROMPTS, Engine, HoldingEngine
from tests.support.scripted_environments import ScriptedEnvironment, ScriptedEnvironments

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS
from posttrain.plan.resolve import resolve
from posttrain.rl.data.mixture import PromptMix
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation
from posttrain.rl.rollout import episode as episode_module
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore

LABEL, SHORT = PROMPTS[0].label, {"rollout__max_response_tokens": 6}
COMPARED = ("prompt_id", "sample_index", "tokens", "loss_mask", "logprobs", "versions", "finish_reason", "reward")
IN_ENVIRONMENT = {"data__environment": "calculator", "data__reward": "environment", "rollout__max_response_tokens": 60}


def test_episodes_are_trajectories_of_their_group(play: Callable[..., None]) -> None:
    environments, engine = ScriptedEnvironments(), Engine()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        for one in (trajectory for group in groups for trajectory in group.trajectories):
            assert (one.reward, one.num_sampled, one.parts["episode/turns"]) == (1.0, 3, 3)
            assert one.parts["environment/turns"] == 3
        first = [body for body in engine.asked if body["input_ids"][0] == engine.asked[0]["input_ids"][0]]
        seeds = {body["sampling_params"][0]["sampling_seed"] for body in engine.asked}
        assert len(seeds) == len(engine.asked), "each turn of each trajectory has a seed of its own"
        assert len(first) >= 1
        assert len({one.seed for one in environments.opened}) == len(environments.opened)

    play(story, engine, environments=environments, rollout__max_staleness=0, algorithm__preset="grpo", **IN_ENVIRONMENT)
    assert environments.num_open == 0


class Seeded(Engine):
    """Answers with one or two digits, cut or not, and log-probabilities, all of which follow from the seed."""

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        seed = body["sampling_params"][0]["sampling_seed"]
        digits = ("7", "8", "78")[seed % 3]
        return [CHARACTERS.index(digit) for digit in digits], "length" if seed % 5 == 0 else "stop"

    def more(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        first = body["sampling_params"][0]["sampling_seed"] % 1000
        return {"output_token_logprobs": [[-(first + n) / 1000, token, None] for n, token in enumerate(tokens)]}


class OneTurn(ScriptedEnvironments):
    """Environments that end at the first action, and pay what the grader of labels pays."""

    async def open(self, seed: int) -> ScriptedEnvironment:
        self.opened.append(OneTurnEnvironment(self, seed))
        return self.opened[-1]


class OneTurnEnvironment(ScriptedEnvironment):
    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        return EpisodeReward(float(trajectory["messages"][-1]["content"] == LABEL), {})


def test_an_environment_that_ends_at_once_makes_the_trajectories_of_plain_prompts(
    play: Callable[..., None], tmp_path: Path
) -> None:
    made, engines = list[list[dict[str, Any]]](), [Seeded(), Seeded()]

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        made.append([one.as_dict() for group in groups for one in group.trajectories])

    settings = {"rollout__max_staleness": 0, "algorithm__preset": "grpo", "rollout__rollout_batch_size": 8,
                "rollout__num_samples_per_prompt": 8, "training__global_batch_size": 64}  # fmt: skip
    play(story, engines[0], **settings)
    shutil.rmtree(tmp_path / "rollouts")
    environments = OneTurn(lambda number, action: Observation((), done=True))
    play(story, engines[1], environments=environments, **(IN_ENVIRONMENT | settings | SHORT))
    plain, played = ([{name: one[name] for name in COMPARED} for one in some] for some in made)
    assert played == plain
    assert {one["reward"] for one in plain} == {0.0, 1.0}
    assert {one["finish_reason"] for one in plain} == {"stop", "length"}
    assert {one["parts"]["episode/turns"] for one in made[1]} == {1}
    asked = [sorted(json.dumps(body, sort_keys=True) for body in engine.asked) for engine in engines]
    assert asked[0] == asked[1]


def test_an_episode_goes_on_after_an_abort_in_the_middle(play: Callable[..., None]) -> None:
    """Its turns are asked for again with the tokens so far, and nothing of it is sampled twice."""

    class Aborting(Engine):
        def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
            return ([DIGIT], "abort") if len(self.asked) % 2 else ([DIGIT], "stop")

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        (group, *_) = (await generator.collect(0)).groups
        assert {one.num_sampled >= 3 for one in group.trajectories} == {True}
        for one in group.trajectories:
            assert len(one.logprobs) == one.num_sampled == sum(span.num_tokens for span in one.versions)

    play(story, Aborting(), environments=ScriptedEnvironments(), **IN_ENVIRONMENT)


def test_a_failed_environment_costs_its_trajectory(play: Callable[..., None]) -> None:
    failed = list[str]()

    def answer(number: int, action: Message) -> Observation:
        if not failed:
            failed.append("once")
            raise EnvironmentFailure("deadline", "no answer within 1 s")
        return Observation((), done=True)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        groups = (await generator.collect(0)).groups
        rewards = [one.reward for group in groups for one in group.trajectories]
        failures = [one.failure for group in groups for one in group.trajectories if one.failure]
        assert sorted(rewards, key=str) == [1.0] * 3 + [None]
        assert failures == ["environment: deadline: no answer within 1 s"]

    settings = {**IN_ENVIRONMENT, "reward__max_failure_share": 0.5, "rollout__max_staleness": 0}
    play(story, Engine(), environments=ScriptedEnvironments(answer), algorithm__preset="grpo", **settings)


def test_a_group_that_cannot_begin_is_left_out_and_too_many_end_the_run(
    play: Callable[..., None], tmp_path: Path
) -> None:
    async def once(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        rollout = await generator.collect(0)
        assert failing not in [group.prompt.messages[0]["content"] for group in rollout.groups]
        assert rollout.queue["queue/dropped_no_environment"] == 1

    async def always(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(RuntimeError, match="environments of 2 groups could not begin"):
            await generator.collect(0)

    settings = {**IN_ENVIRONMENT, "rollout__max_staleness": 0, "algorithm__preset": "grpo"}
    first = resolve({"model": "tiny", "site": "local", "set": "training.seed=42"}, CONFIG).config
    failing = PromptMix(PROMPTS, first.data).take(0, 1)[0].messages[0]["content"]
    play(once, Engine(), environments=ScriptedEnvironments(failing=failing), **settings)
    shutil.rmtree(tmp_path / "rollouts")
    play(always, Engine(), environments=ScriptedEnvironments(num_failing=100), **settings)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_module, "START_PAUSE_SECONDS", 0.0)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PARSING = {**IN_ENVIRONMENT, "engine__kind": "sglang", "environment__tool_call_parser": "glm47"}


class Parsing(Engine):
    """Parses calls, but the first `num_failing` times; then it does not answer, or refuses with a status."""

    def __init__(self, num_failing: int, status: int = 0):
        super().__init__()
        self.num_failing, self.status = num_failing, status

    async def other(self, request: web.Request) -> web.Response:
        if request.path != "/parse_function_call":
            return await super().other(request)
        self.num_failing -= 1
        if self.num_failing < 0:
            return web.json_response({"normal_text": "", "calls": [{"name": "add", "parameters": "{}"}]})
        if not self.status:
            request.transport.close()
        return web.json_response({"error": {"message": "no"}}, status=self.status or 200)


def test_an_engine_that_does_not_answer_a_parse_is_waited_for(play: Callable[..., None]) -> None:
    engine = Parsing(num_failing=10**6)

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError):
            await generator.collect(0)
        engine.num_failing = 0
        await generator._client.wait_ready(5.0)
        await generator.resume(0)
        groups = (await generator.collect(0)).groups
        assert {one.parts["episode/tool_calls"] for group in groups for one in group.trajectories} == {3}

    play(story, engine, environments=ScriptedEnvironments(tools=TOOLS), **PARSING)


@pytest.mark.parametrize(("num_failing", "reward"), [(1, 1.0), (10**6, None)])
def test_a_parser_that_refuses_a_text_twice_costs_its_trajectory(
    play: Callable[..., None], num_failing: int, reward: float | None
) -> None:
    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        (trajectory,) = {one.reward for group in (await generator.collect(0)).groups for one in group.trajectories}
        assert trajectory == reward

    settings = {**PARSING, "reward__max_failure_share": 1}
    play(story, Parsing(num_failing, 400), environments=ScriptedEnvironments(tools=TOOLS), **settings)


def test_no_turn_is_asked_for_while_an_engine_is_replaced(play: Callable[..., None]) -> None:
    """Engines that wait for the trainer: a tool that ends meanwhile has to wait for the weights, too."""
    ended = asyncio.Event()

    class Dying(Engine):
        """Answers one request, and the others once it is back."""

        is_back = False

        def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
            return [DIGIT], "stop" if self.is_back or len(self.asked) == 1 else "die"

    class Slow(ScriptedEnvironments):
        async def open(self, seed: int) -> Any:
            opened = await super().open(seed)
            step = opened.step

            async def slow(action: Message) -> Observation:
                await ended.wait()
                return await step(action)

            opened.step = slow  # type: ignore[method-assign]
            return opened

    engine = Dying()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        with pytest.raises(EngineError):
            await generator.collect(0)
        count, engine.is_back = len(engine.asked), True
        ended.set()
        await asyncio.sleep(0.1)
        assert len(engine.asked) == count
        await generator._client.wait_ready(5.0)
        await generator.resume(0)
        assert len((await generator.collect(0)).groups) == 2

    settings = {**IN_ENVIRONMENT, "rollout__max_staleness": 0, "algorithm__preset": "grpo"}
    play(story, engine, environments=Slow(), **settings)


def test_groups_without_an_environment_leave_room_for_equal_rewards(play: Callable[..., None]) -> None:
    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        state = (await generator.collect(0)).queue
        assert (state["queue/dropped_no_environment"], state["queue/dropped_equal_rewards"]) == (1, 2)

    config = resolve({"model": "tiny", "site": "local", "set": "training.seed=42"}, CONFIG).config
    failing = PromptMix(PROMPTS, config.data).take(0, 1)[0].messages[0]["content"]
    settings = {**IN_ENVIRONMENT, "rollout__max_staleness": 0, "algorithm__preset": "grpo"}
    settings |= {"rollout__dynamic_sampling": "true", "rollout__max_oversampling": 2}
    play(story, Engine(), environments=ScriptedEnvironments(failing=failing), **settings)


def test_what_runs_ends_with_the_generator_and_nothing_begins_after(play: Callable[..., None]) -> None:
    environments = ScriptedEnvironments()

    async def story(generator: TrajectoryGenerator, store: QueueStore) -> None:
        await generator.begin(0)
        while not environments.opened:
            await asyncio.sleep(0.01)
        await generator.close()
        assert environments.num_open == 0
        count = len(environments.opened)
        await asyncio.sleep(0.05)
        assert len(environments.opened) == count

    play(story, HoldingEngine(), environments=environments, **IN_ENVIRONMENT)

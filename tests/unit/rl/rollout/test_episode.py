"""Episodes: what a model is asked turn by turn, what counts, and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_environments import ScriptedEnvironments

from posttrain.checkpoint.tiny.tokenizer import ARITHMETIC, CALL, CALL_END, CHARACTERS, STOP_TOKENS, make_tokenizer
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation
from posttrain.rl.rollout import episode as episode_module
from posttrain.rl.rollout.episode import Episode, EpisodeRunner, row_of
from posttrain.types import Prompt, VersionSpan

CONFIG = Path(__file__).parents[4] / "config"
PROMPT = Prompt(3, ({"role": "user", "content": "12"},), "7", columns={"level": 2})
DIGIT = CHARACTERS.index("7")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(256, ARITHMETIC)
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids([*STOP_TOKENS])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(folder)


class Policy:
    """Answers each turn with `count` digits, or other tokens, and the end token."""

    def __init__(self, end: int, count: int = 1, tokens: tuple[int, ...] = ()):
        self.end, self.tokens = end, tokens or (DIGIT,) * count
        self.asked: list[GenerateRequest] = []
        self.engines: list[int | None] = []

    async def __call__(self, turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
        assert turn == len(self.asked)
        self.asked.append(request)
        self.engines.append(engine)
        tokens = (*self.tokens, self.end)[: request.max_new_tokens]
        reason = "stop" if tokens[-1] == self.end else "length"
        versions = (VersionSpan(turn, len(tokens)),)
        return GenerateResult(
            tokens, (-0.25 * (turn + 1),) * len(tokens), reason, turn, versions=versions, num_cached=2, engine=1
        )


async def no_parser(text: str, tools: Any, parser: str) -> Any:
    raise AssertionError("no parser of an engine is asked")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_module, "START_PAUSE_SECONDS", 0.0)


def play(
    tokenizer: ChatTokenizer, environments: ScriptedEnvironments, policy: Policy | None = None, **settings: Any
) -> tuple[Episode, Policy]:
    limits = {"data.environment": "calculator", "data.reward": "environment", "rollout.max_response_tokens": 100}
    limits |= {f"environment.{key}": value for key, value in settings.items()}
    words = " ".join(f"{key}={value}" for key, value in limits.items())
    config: Config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
    policy = policy or Policy(tokenizer.tokenizer.eos_token_id)
    runner = EpisodeRunner(config, tokenizer, environments, no_parser)
    return asyncio.run(runner.play(PROMPT, 5, policy)), policy


def test_an_episode_is_what_was_read_and_sampled(tokenizer: ChatTokenizer) -> None:
    environments = ScriptedEnvironments()
    episode, policy = play(tokenizer, environments)
    end = tokenizer.tokenizer.eos_token_id
    sampled = [token for token, mark in zip(episode.tokens, episode.loss_mask, strict=True) if mark]
    assert sampled == [DIGIT, end] * 3
    # Each turn is asked with all earlier tokens, verbatim.
    for earlier, later in zip(policy.asked, policy.asked[1:], strict=False):
        assert later.input_ids[: len(earlier.input_ids) + 2] == (*earlier.input_ids, DIGIT, end)
    assert episode.tokens == (*policy.asked[-1].input_ids, DIGIT, end)
    assert episode.logprobs == (-0.25, -0.25, -0.5, -0.5, -0.75, -0.75)
    assert [span.version for span in episode.versions] == [0, 1, 2]
    assert episode.grade == EpisodeReward(1.0, {"turns": 3.0})
    assert (episode.finish_reason, episode.last_response) == ("stop", (DIGIT, end))
    assert policy.engines == [None, 1, 1]
    assert episode.parts["perf/prefix_hit_rate"] == 6 / sum(len(one.input_ids) for one in policy.asked)
    observed = len(policy.asked[2].input_ids) - len(policy.asked[0].input_ids) - 4
    assert (episode.parts["episode/turns"], episode.parts["episode/observed_tokens"]) == (3, observed)


def test_an_environment_is_told_what_was_said(tokenizer: ChatTokenizer) -> None:
    environments = ScriptedEnvironments()
    play(tokenizer, environments)
    (opened,) = environments.opened
    said = {"role": "assistant", "content": "7"}
    assert (opened.seed, opened.actions, opened.is_closed) == (5, [said] * 3, True)
    more = {"role": "user", "content": "1"}
    # The last observation, too, which no response follows.
    assert opened.trajectory["messages"] == [*PROMPT.messages, said, more, said, more, said, more]
    assert (opened.trajectory["end"], opened.trajectory["num_turns"]) == ("done", 3)


@pytest.mark.parametrize(
    ("limits", "policy", "end", "finish_reason"),
    [
        ({"max_turns": 2}, {}, "turns", "stop"),
        ({"max_turn_tokens": 3}, {"count": 3}, "truncated", "length"),
        ({}, {"count": 100}, "truncated", "length"),
        ({}, {"count": 97}, "tokens", "length"),
    ],
)
def test_limits_end_an_episode(
    tokenizer: ChatTokenizer, limits: dict[str, int], policy: dict[str, int], end: str, finish_reason: str
) -> None:
    environments = ScriptedEnvironments()
    episode, asked = play(tokenizer, environments, Policy(tokenizer.tokenizer.eos_token_id, **policy), **limits)
    assert (environments.opened[0].trajectory["end"], episode.finish_reason) == (end, finish_reason)
    assert episode.loss_mask[-1] == 1, "what is read after the last sampled token is left out"
    prompt = len(asked.asked[0].input_ids)
    assert len(episode.tokens) - prompt <= 100
    assert all(len(one.input_ids) - prompt + one.max_new_tokens <= 100 for one in asked.asked)


def test_a_reward_of_a_turn_is_added(tokenizer: ChatTokenizer) -> None:
    def answer(number: int, action: Message) -> Observation:
        return Observation(({"role": "user", "content": "1"},), number == 1, 0.25)

    episode, _ = play(tokenizer, ScriptedEnvironments(answer))
    assert episode.grade == EpisodeReward(1.5, {"turns": 2.0, "turn_rewards": 0.5})


@pytest.mark.parametrize("when", ["step", "reward"])
def test_a_failure_is_the_episodes_grade(tokenizer: ChatTokenizer, when: str) -> None:
    failure = EnvironmentFailure("crash", "gone")

    def answer(number: int, action: Message) -> Observation:
        if number == 1:
            raise failure
        return Observation(({"role": "user", "content": "1"},), done=False)

    environments = ScriptedEnvironments(answer) if when == "step" else ScriptedEnvironments(reward=failure)
    episode, _ = play(tokenizer, environments)
    assert episode.grade is failure
    assert sum(episode.loss_mask) == {"step": 4, "reward": 6}[when]
    assert environments.num_open == 0


def test_an_environment_that_does_not_begin_is_started_again(tokenizer: ChatTokenizer) -> None:
    environments = ScriptedEnvironments(num_failing=2)
    episode, _ = play(tokenizer, environments)
    assert isinstance(episode.grade, EpisodeReward)
    assert (len(environments.opened), environments.num_open) == (3, 0)
    environments = ScriptedEnvironments(num_failing=3)
    with pytest.raises(EnvironmentFailure):
        play(tokenizer, environments)
    assert environments.num_open == 0


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_call_is_read_only_if_there_are_tools(tokenizer: ChatTokenizer, tools: list[dict[str, Any]] | None) -> None:
    environments = ScriptedEnvironments(lambda number, action: Observation((), True), tools)
    policy = Policy(tokenizer.tokenizer.eos_token_id, tokens=tokenizer.encode(f"{CALL}1{CALL_END}"))
    episode, _ = play(tokenizer, environments, policy)
    (action,) = environments.opened[0].actions
    function = {"name": "calculator", "arguments": {"expression": "1"}}
    called = [{"id": "call_0", "type": "function", "function": function}]
    assert action.get("tool_calls") == (called if tools else None)
    assert episode.parts["episode/tool_calls"] == bool(tools)


def test_a_first_prompt_without_room_costs_its_group(tokenizer: ChatTokenizer) -> None:
    environments = ScriptedEnvironments()
    limits = {"data.environment": "calculator", "data.reward": "environment", "rollout.max_prompt_tokens": 3}
    words = " ".join(f"{key}={value}" for key, value in limits.items())
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
    runner = EpisodeRunner(config, tokenizer, environments, no_parser)
    with pytest.raises(EnvironmentFailure, match=r"too long: rollout.max_prompt_tokens"):
        asyncio.run(runner.play(PROMPT, 5, Policy(tokenizer.tokenizer.eos_token_id)))
    assert environments.num_open == 0


def test_an_environment_sees_the_rows_columns_and_tools() -> None:
    prompt = Prompt(1, ({"role": "user", "content": "a"},), "7", columns={"level": 2}, tools=TOOLS)
    assert row_of(prompt) == {"messages": [*prompt.messages], "label": "7", "level": 2, "tools": TOOLS}

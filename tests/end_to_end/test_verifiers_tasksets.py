"""Tasksets of verifiers 0.4.0 in our server, held against verifiers alone on the same scripted actions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.public_environments import act, nemo_gym, openenv, play, row_of
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.verifiers_tasksets import Taskset
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import Row, read_rows
from posttrain.rl.engines.engine_endpoints import client_of, engines_to_ask
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message
from posttrain.rl.environments.service import ServiceEnvironment
from posttrain.rl.environments.tool_calls import parse_action
from posttrain.rl.rollout.episode import Episode, EpisodeRunner
from posttrain.types import Prompt

pytestmark = pytest.mark.faults("environments")
WORDS = ("apple", "river", "stone", "cloud", "bread")
COMPARE = Taskset("verifiers_compare")
# Its tool.
TOOL = "compare"


def check(
    folder: Path, taskset: Taskset, episodes: Sequence[tuple[dict[str, Any], Sequence[Message]]]
) -> list[tuple[list[str], float]]:
    """Play scripted actions; assert that the agent reads and earns what it does in verifiers alone."""
    with taskset.served() as url:
        ours = [play(url, row, *actions) for row, actions in episodes]
    for (read, reward), theirs in zip(ours, taskset.alone(folder, episodes), strict=True):
        assert theirs["ok"]
        assert theirs["rewards"] == [reward]
        assert theirs["read"][len(theirs["read"]) - len(read) :] == read
    return ours


def test_nemo_gym(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of("example_session_state_mgmt")) + "\n")
    add = [("increment_counter", {"count": count}) for count in (1, 2)]
    right = [act(*add), act(("get_counter_value", {})), act(text="6")]
    wrong = [act(("increment_counter", {"count": 1})), act(("increment_counter", {}), ("verify", {})), act(text="6")]
    with nemo_gym("example_session_state_mgmt", "StatefulCounterResourcesServer") as url:
        taskset = Taskset("nemo_gym", {"dataset": str(path), "task": {"resources_url": url}})
        (row,) = taskset.rows()
        found = check(tmp_path, taskset, [(row, right), (row, wrong)])
    assert found[0] == (['{"success":true}', '{"success":true}', '{"count":6}'], 1.0)
    assert "Field required" in found[1][0][1]
    assert found[1][0][2] == "error: unknown tool 'verify'"
    assert found[1][1] == 0.0


def test_openenv(tmp_path: Path) -> None:
    """Their client of OpenEnv 0.4.1, with a server of 0.10.0."""
    with openenv("openenv_guess:app", ROOT / "tests/support") as url:
        taskset = Taskset("openenv", {"base_url": url, "resets": [{"seed": 3, "highest": 8}]})
        (row,) = taskset.rows()
        guesses = [[act(text=json.dumps({"digit": digit})) for digit in digits] for digits in ((2, 3), (0, 1, 2, 4))]
        right, wrong = check(tmp_path, taskset, [(row, actions) for actions in guesses])
        with taskset.served() as served, pytest.raises(EnvironmentFailure, match=r"error: EnvError: .*a defect"):
            play(served, row, act(text='{"digit": 66}'))
    assert json.loads(right[0][0])["observation"]["hint"] == "higher"
    assert (right[1], wrong[1]) == (1.0, 0.0)


@pytest.fixture(scope="module")
def hangman(tmp_path_factory: pytest.TempPathFactory) -> Taskset:
    """TextArena's Hangman; NLTK's words are not on PyPI, so these are ours."""
    folder = tmp_path_factory.mktemp("nltk")
    (folder / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / "corpora/words" / name).write_text("\n".join(WORDS) + "\n")
    return Taskset("textarena", {"game": "Hangman-v0"}, {"NLTK_DATA": str(folder)})


def test_textarena(hangman: Taskset, tmp_path: Path) -> None:
    rows = hangman.rows("--limit", "2")
    assert [row["label"] for row in rows] == ["Hangman-v0#0", "Hangman-v0#1"]
    first, second = (random.Random(seed).choice(WORDS) for seed in range(2))
    won = [act(text=f"[{first[0]}]"), act(text=f"I know it: [{first}]")]
    lost = [act(text=f"[{letter}]") for letter in (second[1], *"qxjzfg")]
    found = check(tmp_path, hangman, list(zip(rows, (won, lost), strict=True)))
    assert [reward for _, reward in found] == [1.0, second.count(second[1]) / len(second)]
    assert f"  {second[1].upper()}  " in found[1][0][0]


@pytest.fixture(scope="module")
def compare() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """The address of a taskset on the base classes of verifiers, and its rows by name."""
    with COMPARE.served("--idle-seconds", "60") as url:
        yield url, {row["label"]: row for row in COMPARE.rows()}


def test_weighted_rewards(compare: tuple, tmp_path: Path) -> None:
    url, rows = compare
    ask = act((TOOL, {"digit": 5, "number": 3}), (TOOL, {"digit": 3, "number": 3}))
    wrong_calls = act((TOOL, {"digit": 5}), ("none", {}), (TOOL, "x"))
    episodes = [
        [ask, act(text="3")],
        [ask, act(text="It is surely 3.")],
        [wrong_calls, act(text="4")],
        # Their `@stop` ends it.
        [ask] * 4,
    ]
    played = [(rows["fine"], actions) for actions in episodes]
    ours = [play(url, *row_and_actions[:1], *row_and_actions[1]) for row_and_actions in played]
    assert [reward for _, reward in ours] == [0.75, 0.5, 0.0, 0.0]
    assert ours[0][0] == ["less", "equal"]
    for (read, reward), theirs in zip(ours, COMPARE.alone(tmp_path, played), strict=True):
        assert (theirs["ok"], theirs["rewards"]) == (True, [reward])
        assert theirs["read"][len(theirs["read"]) - len(read) :] == read


@pytest.mark.parametrize("end", ["turns", "truncated"])
def test_limits_of_ours_are_limits_of_theirs(compare: tuple, end: str, tmp_path: Path) -> None:
    """What has happened until then is scored, as with verifiers' own limit of turns."""
    url, rows = compare
    actions = [act((TOOL, {"digit": 3, "number": 3}), text="Perhaps 3?")]
    _, reward = play(url, rows["fine"], *actions, end=end)
    (theirs,) = COMPARE.alone(tmp_path, [(rows["fine"], actions)], max_turns=1)
    assert [reward] == theirs["rewards"] == [0.75]


def test_a_call_of_a_response_that_was_cut_is_not_made(tmp_path: Path) -> None:
    """A limit may have cut the call itself; what its tool would change must not change after the end."""
    calls = tmp_path / "calls.txt"
    (row,) = COMPARE.rows("--limit", "1")
    actions = [act((TOOL, {"digit": 5, "number": 3})), act((TOOL, {"digit": 4, "number": 3}), text="3?")]
    with dataclasses.replace(COMPARE, variables={"COMPARE_CALLS": str(calls)}).served() as url:
        assert play(url, row, *actions, end="truncated") == (["less"], 0.75)
        assert calls.read_text() == "5 3\n"


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("setup", "error: TaskError: task setup: RuntimeError: a defect"),
        ("reward", "error: TaskError: .*KeyError: 'gold'"),
        ("not a number", "error: the reward is nan, no finite number"),
        ("no reward", "error: no reward: the task has none"),
        ("scoring takes too long", "deadline: verifiers' own limit: scoring_timeout"),
    ],
)
def test_failures_are_no_zeros(compare: tuple, fault: str, failure: str) -> None:
    url, rows = compare
    with pytest.raises(EnvironmentFailure, match=failure):
        play(url, rows[fault], act(text=str(rows[fault]["verifiers_task"]["number"])))


def test_rows_of_something_else(compare: tuple) -> None:
    with pytest.raises(EnvironmentFailure, match=r"error: .*the row has no verifiers_task"):
        play(compare[0], {})
    with pytest.raises(EnvironmentFailure, match=r"error: .*number"):
        play(compare[0], {"verifiers_task": {"prompt": "a"}})


def test_a_closed_session_leaves_nothing_behind(compare: tuple) -> None:
    """Not the process of its tools, and none that its task waits for, though the client never learned its name."""
    url, rows = compare

    def running(word: str) -> int:
        found = [process.cmdline() for process in psutil.Process().children(recursive=True)]
        return sum(word in words and "posttrain_verifiers" not in words for words in found)

    async def until(word: str, count: int) -> None:
        latest = time.monotonic() + 60
        while running(word) != count:
            assert time.monotonic() < latest
            await asyncio.sleep(0.1)

    async def story() -> None:
        environment = ServiceEnvironment(url, 60, 0)
        await environment.reset(rows["fine"])
        await until("verifiers_compare", 1)
        await environment.close()
        await until("verifiers_compare", 0)
        hanging = ServiceEnvironment(url, 20, 0)
        resetting = asyncio.create_task(hanging.reset(rows["hangs"]))
        await until("600.25", 1)
        with pytest.raises(EnvironmentFailure, match="deadline: /reset"):
            await resetting
        await hanging.close()
        await until("600.25", 0)

    asyncio.run(story())
    assert play(url, rows["fine"], act(text="3"))[1] == 0.75


def test_an_embedded_engine_plays_hangman(hangman: Taskset, tmp_path: Path) -> None:
    """Random responses of two turns: their grade is what verifiers gives for them."""
    chat = ChatTokenizer(_random_model(tmp_path / "model"))
    (row,) = hangman.rows("--limit", "1")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (read,) = read_rows("rows", [path], Reading()).rows
    with hangman.served() as url:
        episode, responses = asyncio.run(_sampled(chat, tmp_path, url, read))
    actions = [parse_action(chat.text_of_turn(response), None) for response in responses]
    assert len(actions) == 2
    assert tuple(token for response in responses for token in response) == tuple(
        token for token, mark in zip(episode.tokens, episode.loss_mask, strict=True) if mark
    )
    (theirs,) = hangman.alone(tmp_path, [(row, actions)], max_turns=2)
    assert isinstance(episode.grade, EpisodeReward)
    assert [episode.grade.reward] == theirs["rewards"]


def _random_model(folder: Path) -> Path:
    architecture = dataclasses.replace(TINY_QWEN3, max_position_embeddings=8192)
    make_random_checkpoint(folder, architecture, seed=3)
    tokenizer = make_tokenizer(architecture.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        stops = tokenizer.convert_tokens_to_ids([*STOP_TOKENS])
        (folder / name).write_text(json.dumps({**content, "eos_token_id": stops}))
    return folder


async def _sampled(chat: ChatTokenizer, folder: Path, url: str, row: Row) -> tuple[Episode, list[Sequence[int]]]:
    """Return an episode of two turns, and its responses."""
    settings = {
        "data.environment": url,
        "data.reward": "environment",
        "environment.max_turns": 2,
        "rollout.max_response_tokens": 4000,
        "rollout.fp8": "false",
        **{f"model.architecture.{key}": value for key, value in dataclasses.asdict(TINY_QWEN3).items()},
        "model.architecture.max_position_embeddings": 8192,
    }
    words = " ".join(f"{key}={value}" for key, value in settings.items() if not isinstance(value, dict))
    config = resolve({"model": "tiny_qwen3", "site": "local", "set": words}, CONFIG_DIR).config
    responses: list[Sequence[int]] = []
    with (
        environments_of(config) as environments,
        engines_to_ask(config, folder / "model", folder / "logs", merge_requests=True) as engines,
    ):
        async with client_of(config, engines) as client:
            runner = EpisodeRunner(config, chat, environments, client.parse_tool_calls, limits_prompts=False)

            async def respond(turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
                result = await client.sample(dataclasses.replace(request, sampling_seed=turn), engine)
                responses.append(result.output_ids)
                return result

            prompt = Prompt(0, row.messages, row.label, columns=row.columns)
            return await runner.play(prompt, 0, respond), responses


def test_a_session_that_the_server_does_not_know(compare: tuple) -> None:
    """It was started again, or has closed a session that had no call for long."""

    async def story() -> None:
        environment = ServiceEnvironment(compare[0], 60, 0)
        await environment.reset(compare[1]["fine"])
        environment._session = "of the one before"
        with pytest.raises(EnvironmentFailure, match="crash: the service has no such session"):
            await environment.step(act(text="3"))
        await environment.close()

    asyncio.run(story())

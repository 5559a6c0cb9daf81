"""The environment `python`, in real sandboxes, alone and in the pool's worker processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE
from posttrain.config.sandbox_needs import needs_sandbox
from posttrain.plan.resolve import resolve
from posttrain.rl.environments.pool import EnvironmentPool
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.rl.environments.python_tool import MAX_CHARACTERS, TOOL, PythonTool
from posttrain.rl.environments.tool_calls import parse_action

CONFIG_DIR = Path(__file__).parents[4] / "config"
ROW = {"messages": [{"role": "user", "content": "What is 2**20?"}], "label": "1048576"}


def call(code: object, name: str = "python") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'code': code}})}</tool_call>"


def play(*texts: str, environment: Any = None) -> tuple[list[str], bool, float]:
    """Return what the agent reads after each response, whether the episode has ended, and the reward."""

    async def episode() -> tuple[list[str], bool, float]:
        played, read, done = environment or PythonTool(0, seconds=5.0), [], False
        messages, tools = await played.reset(ROW)
        assert (messages, tools) == (ROW["messages"], [TOOL])
        for text in texts:
            answers, done = await played.step(parse_action(text, tools))
            read += [answer["content"] for answer in answers]
        return read, done, await played.reward({})

    return asyncio.run(episode())


def test_an_episode_with_a_program_and_the_answer() -> None:
    assert play(call("print(2**20)"), "So it is 1048576.") == (["1048576\n"], True, 1.0)
    assert play("The answer is 1048577.") == ([], True, 0.0)
    assert play(call("print(1)"))[1:] == (False, 0.0)


def test_nothing_is_kept_for_the_next_call() -> None:
    (_, read), *_ = play(
        call("x = 1\nopen('x', 'w').close()"), call("import os\nprint(os.path.exists('x'), 'x' in globals())")
    )
    assert read == "False False\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("print('a')\nraise ValueError('b')"), ["a\nerror: exit code 1\nTraceback", "ValueError: b"]),
        (call("import os\nos.kill(os.getpid(), 9)"), ["error: killed"]),
        (call("while True: print('x' * 1000)"), ["characters ...", "error: output"]),
        (call("print(", "shell"), ["error: there is no function 'shell'"]),
        (call(5), ["error: give the argument code"]),
        (call(" "), ["error: give the argument code"]),
    ],
)
def test_what_goes_wrong_is_an_observation(text: str, expected: list[str]) -> None:
    ((observation,), done, _) = play(text)
    assert not done
    assert [part for part in expected if part not in observation] == []


def test_of_long_outputs_the_middle_is_left_out() -> None:
    ((observation,), *_) = play(call(f"print('a' * {MAX_CHARACTERS} + 'b' * {MAX_CHARACTERS - 1})"))
    half = MAX_CHARACTERS // 2
    assert observation == f"{'a' * half}\n... {MAX_CHARACTERS} characters ...\n{'b' * (half - 1)}\n"


def config_of(overrides: str):
    words = f"data.environment=python data.reward=environment {overrides}"
    return resolve({"model": "tiny", "site": "local", "set": words}, CONFIG_DIR).config


async def first_observation(overrides: str, code: str) -> str:
    with EnvironmentPool.of(config_of(overrides)) as pool:
        environment = await pool.open(0)
        await environment.reset(ROW)
        observation = await environment.step(parse_action(call(code), [TOOL]))
        await environment.close()
        return str(observation.messages[0]["content"])


def test_workers_have_the_limits_of_the_configuration() -> None:
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    assert asyncio.run(first_observation("sandbox.seconds=7", code)) == "8\n"


def test_a_failed_sandbox_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SANDBOX_SECRET_VARIABLE, "secret")
    with pytest.raises(EnvironmentFailure, match="SandboxUnavailable"):
        asyncio.run(first_observation("sandbox.address=http://127.0.0.1:9", "print(1)"))


def test_the_plan_knows_that_it_needs_a_sandbox() -> None:
    assert needs_sandbox(config_of(""))

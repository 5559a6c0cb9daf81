"""The environment `python`, in real sandboxes, alone and in the pool's worker processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.environment import MAX_PROGRAMS
from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE
from posttrain.config.sandbox_needs import needs_sandbox
from posttrain.plan.resolve import resolve
from posttrain.rl.environments.pool import EnvironmentPool, source_of
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.rl.environments.python_tool import (
    FILES_PER_SANDBOX,
    MAX_CHARACTERS,
    TOOL,
    PythonTool,
    max_sandboxes,
)
from posttrain.rl.environments.tool_calls import parse_action
from posttrain.sandbox.program import Limits, Program
from posttrain.sandbox.run import run

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


def test_a_message_of_endless_programs_keeps_the_deadline() -> None:
    endless = call("while 1: pass")
    read, done, _ = play(endless * 7, environment=PythonTool(0, seconds=0.3))
    assert read == ["error: time"] * MAX_PROGRAMS + [f"error: at most {MAX_PROGRAMS} calls in one message"] * 3
    assert not done


def test_programs_of_a_worker_wait_for_a_cpu() -> None:
    code = "import time\nprint(time.monotonic())\ntime.sleep(0.2)\nprint(time.monotonic())"

    async def read_at_once() -> list[str]:
        tools = [PythonTool(0, len(os.sched_getaffinity(0)), seconds=60.0) for _ in range(6)]
        steps = await asyncio.gather(*(tool.step(parse_action(call(code), [TOOL])) for tool in tools))
        return [observation["content"] for ((observation,), _) in steps]

    runs = sorted([float(word) for word in read.split()] for read in asyncio.run(read_at_once()))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))


def test_workers_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads(source_of(config_of("environment.num_workers=3"))["settings"])
    assert settings["num_workers"] == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [max_sandboxes(number) for number in (1, 3, 9)] == [8, 2, 1]


def test_running_sandboxes_are_not_taken_for_files_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose files are half of what it may open takes no other environment."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert max_sandboxes(2) * FILES_PER_SANDBOX <= 1024 // 2


def test_a_sandbox_has_few_open_files() -> None:
    async def most_files() -> int:
        before = found = len(os.listdir("/proc/self/fd"))
        program = asyncio.create_task(run(Program("import time\ntime.sleep(0.5)"), Limits()))
        while not program.done():
            found = max(found, len(os.listdir("/proc/self/fd")))
            await asyncio.sleep(0.01)
        assert program.result().is_success
        return found - before

    assert 0 < asyncio.run(most_files()) <= FILES_PER_SANDBOX


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

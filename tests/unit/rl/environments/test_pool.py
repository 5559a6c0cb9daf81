"""Environments in worker processes: each fault costs its own episode, or those of its process, and is named."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from tests.support import nasty_environment
from tests.support.workflow_runs import ROOT

from posttrain.config.load import merge
from posttrain.config.own_environment import inspect_environment
from posttrain.rl.engines.event_loop import LoopThread
from posttrain.rl.environments import worker_process
from posttrain.rl.environments.pool import EnvironmentPool
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Start

SOURCE = Path(nasty_environment.__file__)
DEADLINE_SECONDS = 2.0
MEMORY_BYTES = 400 << 20
CALLS = [{"function": {"name": "f", "arguments": "{"}}]
ROW = {"messages": [{"role": "user", "content": "begin"}], "label": "begin"}


def source_of(name: str = "Nasty") -> dict[str, str]:
    own = inspect_environment(f"{SOURCE}:{name}")
    return {"path": own.path, "name": own.name, "digest": own.digest}


def pool_of(name: str = "Nasty", num_workers: int = 1, deadline: float = DEADLINE_SECONDS) -> EnvironmentPool:
    return EnvironmentPool(source_of(name), deadline, num_workers, MEMORY_BYTES)


def run(story: Callable[[EnvironmentPool], Awaitable[object]], *given: object, **named: object):
    """Tell a story in an event loop of its own."""

    async def tell():
        with pool_of(*given, **named) as pool:
            return await asyncio.wait_for(story(pool), 60)

    return asyncio.run(tell())


def action(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def said(environment, text: str) -> str:
    return (await environment.step(action(text))).messages[0]["content"]


async def failure(environment, text: str) -> tuple[str, str]:
    with pytest.raises(EnvironmentFailure) as caught:
        await environment.step(action(text))
    return caught.value.kind, caught.value.reason


def descendants() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def test_an_episode_from_its_seed():
    async def story(pool):
        first, same, other = [await pool.open(seed) for seed in (7, 7, 8)]
        assert await first.reset(ROW) == Start(({"role": "user", "content": (await said(first, "pid"))},), None)
        draws = [await said(environment, "random") for environment in (first, same, other)]
        assert draws[0] == draws[1] != draws[2]
        assert await first.reward({"end": "parts"}) == EpisodeReward(0.5, {"speed": 2.0})
        await first.close()
        await first.close()

    run(story)


def test_environments_are_spread_and_free_workers_are_used_again():
    async def story(pool):
        opened = await asyncio.gather(*(pool.open(seed) for seed in range(6)))
        pids = [await said(environment, "pid") for environment in opened]
        assert sorted(map(pids.count, {*pids})) == [3, 3]
        await asyncio.gather(*(environment.close() for environment in opened))
        assert {await said(await pool.open(0), "pid"), await said(await pool.open(0), "pid")} == {*pids}

    run(story, num_workers=2)


@pytest.mark.parametrize(
    ("word", "kind", "reason"),
    [
        ("raise", "error", f"KeyError: 'gold' ({SOURCE}"),
        ("leave", "error", "SystemExit: 1"),
        ("flood", "error", "exceeds the limit"),
        ("return ([], False)", "error", "step returned no messages, but the episode has not ended"),
        ("return 7", "error", "step returned 7; expected (messages, done)"),
        ("return ('hello', False)", "error", "'messages' is 'hello', expected a list"),
        ("return ([{'role': 'user', 'content': {1}}], False)", "error", "set is not a JSON type"),
        (
            "return ([{'role': 'judge', 'content': ''}], False)",
            "error",
            "'judge' as 'role', expected one of system",
        ),
        ("return ([{'role': 'assistant', 'content': 'a'}], False)", "error", "'assistant' as 'role'"),
        ("return ([{'role': 'user', 'content': 3}], False)", "error", "3 as 'content', expected a text"),
        ("return ([{'role': 'user', 'content': [{'type': 'image_url'}]}], False)", "error", "image_url in 'content':"),
        ("return ([{'role': 'user', 'content': '\\ud800'}], False)", "error", "surrogates not allowed"),
        ("return ([{'role': 'user', 'content': '', 'a': float('inf')}], False)", "error", "not JSON compliant"),
        ("return ([], 'yes')", "error", "'done' is 'yes', expected true or false"),
        ("return ([], True, float('nan'))", "error", "'reward' is nan"),
        ("return ([], True, '1')", "error", "'reward' is '1', expected a number"),
    ],
)
def test_an_error_is_its_own_episodes(shared, word: str, kind: str, reason: str):
    loop, pool, bystander = shared

    async def story():
        environment, pid = await pool.open(0), await said(bystander, "pid")
        assert await said(environment, "pid") == pid
        found = await failure(environment, word)
        assert found[0] == kind
        assert reason in found[1]
        await environment.close()
        assert await said(bystander, "pid") == pid

    loop.run(story())


@pytest.fixture(scope="module")
def shared():
    """An event loop in a thread, as the trainer's, a pool with one worker, and an environment in it."""
    with LoopThread() as loop, pool_of() as pool:
        yield loop, pool, loop.run(pool.open(1))


@pytest.mark.parametrize(
    ("end", "reason"),
    [("nan", "'reward' is nan"), ("text", "'1', expected a number"), ("none", "'reward' is None, expected a number")],
)
def test_a_reward_is_a_finite_number(shared, end: str, reason: str):
    loop, _, bystander = shared
    with pytest.raises(EnvironmentFailure, match="environment error") as caught:
        loop.run(bystander.reward({"end": end}))
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("return [], None", "reset returned no messages"),
        ("return [{'role': 'user', 'content': 'a'}], [3]", "'tools' must hold the JSON schemas of functions"),
        ("return 3", "reset returned 3; expected (messages, tools)"),
        (
            "return [{'role': 'assistant', 'tool_calls': [{'function': {'name': 'f', 'arguments': '{'}}]}], None",
            "not JSON",
        ),
    ],
)
def test_what_reset_returns_is_checked(shared, label: str, reason: str):
    loop, pool, _ = shared

    async def story():
        environment = await pool.open(0)
        with pytest.raises(EnvironmentFailure) as caught:
            await environment.reset({**ROW, "label": label})
        assert reason in caught.value.reason
        await environment.close()

    loop.run(story())


def test_a_row_that_is_no_json_and_an_environment_that_cannot_be_made(shared):
    loop, pool, bystander = shared
    with pytest.raises(EnvironmentFailure, match="the argument of reset is not JSON"):
        loop.run(bystander.reset({"label": {1}}))
    with pytest.raises(EnvironmentFailure, match="ValueError: thirteen"):
        loop.run(pool.open(13))


def test_one_that_awaits_for_ever_fails_alone():
    async def story(pool):
        bystander, hanging = await pool.open(0), await pool.open(1)
        pid = await said(bystander, "pid")
        waits = asyncio.create_task(said(bystander, "sleep 1.5"))
        assert await failure(hanging, "hang") == ("deadline", "step did not end within 2 s")
        assert (await waits, await said(bystander, "pid")) == ("1.5", pid)
        await hanging.close()

    run(story)


def test_one_that_blocks_ends_its_process_and_another_takes_over(monkeypatch):
    monkeypatch.setattr(worker_process, "CANCEL_SECONDS", 0.5)

    async def story(pool):
        bystander, blocking = await pool.open(0), await pool.open(1)
        blocks = asyncio.create_task(failure(blocking, "block"))
        await asyncio.sleep(0.5)
        kind, reason = await failure(bystander, "pid")
        assert kind == "crash"
        assert "another environment blocked it (step did not end within 2 s)" in reason
        assert await blocks == ("deadline", "step did not end within 2 s")
        assert (await failure(bystander, "pid"))[0] == "crash"
        await bystander.close()
        await blocking.close()
        assert await said(await pool.open(2), "pid")

    run(story)


@pytest.mark.parametrize(("word", "reason"), [("exit", "died with exit code 3"), ("garbage", "sent an invalid answer")])
def test_one_that_crashes_takes_the_others_of_its_process(word: str, reason: str):
    async def story(pool):
        first, second = await pool.open(0), await pool.open(1)
        other = asyncio.create_task(failure(second, "sleep 60"))
        await asyncio.sleep(0.2)
        for kind, text in (await failure(first, word), await other, await failure(second, "pid")):
            assert kind == "crash"
            assert reason in text
        assert await said(await pool.open(2), "pid")

    run(story)


def test_what_a_crashed_environment_has_started_ends():
    async def story(pool):
        environment = await pool.open(0)
        child = int(await said(environment, "child"))
        assert (await failure(environment, "exit"))[0] == "crash"
        await until_gone([child])

    run(story)


def test_memory_that_runs_out_is_a_crash_of_one_episode():
    async def story(pool):
        bystander, full = await pool.open(0), await pool.open(1)
        pid = await said(bystander, "pid")
        assert await failure(full, "fill") == ("crash", "the process ran out of memory")
        assert await said(bystander, "pid") == pid
        fresh = await pool.open(2)
        assert await said(fresh, "pid") != pid
        await full.close()
        await bystander.close()
        assert await said(fresh, "pid")

    run(story)


@pytest.mark.parametrize("what", ["memory", "files", "threads"])
def test_a_process_in_which_something_remains_gets_no_other_environment(what: str, caplog):
    async def story(pool):
        leaking = await pool.open(0)
        pid = await said(leaking, "pid")
        await said(leaking, f"leak {what}")
        await leaking.close()
        assert await said(await pool.open(1), "pid") != pid
        await until_gone([int(pid)])

    run(story)
    assert "their process is replaced" in caplog.text


def test_prints_go_to_the_log_and_nothing_is_read(capfd):
    async def story(pool):
        environment = await pool.open(0)
        await said(environment, "print")
        assert await said(environment, "read") == "''"

    run(story)
    out, err = capfd.readouterr()
    assert "hello from the environment" in err
    assert not out


def test_plain_methods_block_nobody():
    async def story(pool):
        opened = [await pool.open(seed) for seed in range(12)]
        start = time.perf_counter()
        await asyncio.gather(*(said(environment, "1") for environment in opened))
        assert time.perf_counter() - start < 3
        assert await opened[0].reward({"end": "done"}) == EpisodeReward(0.25)
        for environment in opened:
            await environment.close()

    run(story, "Plain", deadline=20.0)


def test_an_environment_is_closed_after_the_call_that_was_given_up(capfd):
    async def story(pool):
        environment = await pool.open(0)
        step = asyncio.create_task(environment.step(action("1")))
        await asyncio.sleep(0.3)
        step.cancel()
        start = time.perf_counter()
        await environment.close()
        assert time.perf_counter() - start > 0.4

    run(story, "Plain")
    assert capfd.readouterr().err.count("closed an environment") == 1


def test_a_source_that_cannot_be_imported_is_named(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text(SOURCE.read_text() + "\nimport nothing_of_that_name\n")
    own = inspect_environment(f"{path}:Nasty")

    async def story():
        with EnvironmentPool({"path": own.path, "name": own.name, "digest": own.digest}, 5, 1, MEMORY_BYTES) as pool:
            for _ in range(2):
                with pytest.raises(EnvironmentFailure, match=r"error: ModuleNotFoundError: .*nothing_of_that_name"):
                    await pool.open(0)
            path.write_text(SOURCE.read_text())
            with pytest.raises(EnvironmentFailure, match="has changed since the run was planned"):
                await pool.open(0)

    asyncio.run(story())


def test_the_pool_of_a_configuration(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.read_text())
    settings = "environment.num_workers=1 environment.deadline_seconds=3"
    words = f"data.environment={path}:Nasty data.reward=environment {settings}"
    config = merge({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config

    async def story():
        with EnvironmentPool.of(config) as pool:
            assert await failure(await pool.open(0), "hang") == ("deadline", "step did not end within 3 s")
        with pytest.raises(EnvironmentFailure, match="the environments have ended"):
            await pool.open(0)

    asyncio.run(story())
    path.write_text("\n" + SOURCE.read_text())
    with pytest.raises(RuntimeError, match="has changed since the run was planned"):
        EnvironmentPool.of(config)


def test_at_the_end_nothing_remains():
    async def story(pool):
        environment = await pool.open(0)
        await failure(environment, "hang")
        return [int(await said(environment, word)) for word in ("pid", "child")]

    before = descendants()
    pids = run(story)
    assert not [pid for pid in pids if is_running(pid)]
    assert descendants() <= before


PARENT = """
import asyncio, sys
from tests.unit.rl.environments.test_pool import pool_of, said, action

async def main():
    with pool_of(num_workers=2) as pool:
        opened = [await pool.open(seed) for seed in range(2)]
        pids = [await said(environment, word) for environment in opened for word in ("pid", "child")]
        asyncio.create_task(opened[0].step(action("block")))
        await asyncio.sleep(0.2)
        print(*pids, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_process_survives_a_killed_parent(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
    asyncio.run(until_gone(pids))


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(15):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Environments over HTTP: our server and client, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.support import nasty_environment
from tests.support.answering_services import answering
from tests.support.workflow_runs import ROOT

from posttrain.config.load import merge
from posttrain.config.own_environment import inspect_environment
from posttrain.rl.environments.http_calls import HttpCalls
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.nemo_gym import NemoGymEnvironment
from posttrain.rl.environments.openenv import OpenEnvEnvironment
from posttrain.rl.environments.pool import EnvironmentPool, PooledEnvironment, own_source
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Observation, Start
from posttrain.rl.environments.service import ServiceEnvironment

SERVE = [sys.executable, "-m", "posttrain.rl.environments.serve"]
NASTY = f"{Path(nasty_environment.__file__)}:Nasty"
USER = [{"role": "user", "content": "go"}]


@contextlib.contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve in a process; yield the address."""
    command = [*SERVE, *words, "--port", "0", "--num-workers", "1", "--memory-gib", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield line.split()[3], server
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(NASTY, "--deadline-seconds", "2", "--idle-seconds", "600") as (url, _):
        yield url


def action(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def play(url: str, *words: str, end: str = "done", deadline: float = 20.0):
    """Return what each action is answered with, failures included, and the reward."""

    async def episode():
        environment, found = ServiceEnvironment(url, deadline, 7), []
        await environment.reset({"messages": USER, "label": "begin"})
        for word in words:
            try:
                found.append((await environment.step(action(word))).messages[0]["content"])
            except EnvironmentFailure as failure:
                found.append((failure.kind, failure.reason))
        try:
            found.append(await environment.reward({"messages": USER, "end": end}))
        except EnvironmentFailure as failure:
            found.append((failure.kind, failure.reason))
        await environment.close()
        return found

    return asyncio.run(episode())


def test_a_served_environment_is_that_of_a_worker(address):
    async def local():
        with EnvironmentPool(own_source(inspect_environment(NASTY)), 5, 1, 400 << 20) as pool:
            environment = await pool.open(7)
            return (await environment.step(action("random"))).messages[0]["content"]

    assert play(address, "random", end="parts") == [asyncio.run(local()), EpisodeReward(0.5, {"speed": 2.0})]


def test_failures_keep_their_kind(address):
    found = play(address, "raise", "hang", "return 7", end="nan")
    assert [kind for kind, _ in found] == ["error", "deadline", "error", "error"]
    assert found[1] == ("deadline", "step did not end within 2 s")
    assert found[0][1].startswith("KeyError: 'gold'")


def test_a_crash_and_what_comes_after_it(address):
    found = play(address, "exit", "pid")
    assert found[0] == ("crash", "its process died with exit code 3")
    assert [kind for kind, _ in found] == ["crash"] * 3
    assert play(address, "random")[0]


def test_the_clients_own_deadline(address):
    found = play(address, "sleep 1.5", deadline=0.5)
    assert found[0] == ("deadline", "/step was not answered within 0.5 s")


def test_a_session_that_the_service_does_not_know(address):
    async def story():
        calls = HttpCalls(address, 5)
        with pytest.raises(EnvironmentFailure, match="crash: the service has no such session"):
            await calls.post("/step", {"session": "a", "action": action("pid")})
        for body, text in (({}, "KeyError: 'session'"), ([], "expected an object"), ({"session": 3}, "no such")):
            with pytest.raises(EnvironmentFailure, match=text):
                await calls.post("/reward", body)
        await calls.close()

    asyncio.run(story())


def test_a_session_without_calls_is_closed():
    with serving(NASTY, "--idle-seconds", "0.3") as (url, _):

        async def story():
            environment = ServiceEnvironment(url, 5, 0)
            await environment.reset({"messages": USER, "label": "begin"})
            await asyncio.sleep(1)
            with pytest.raises(EnvironmentFailure, match="no such session"):
                await environment.step(action("pid"))
            await environment.close()

        asyncio.run(story())


def test_a_service_that_ends_or_is_not_there():
    with serving("calculator") as (url, server):

        async def story():
            environment = ServiceEnvironment(url, 5, 0)
            start = await environment.reset({"messages": USER, "label": "7"})
            assert isinstance(start, Start)
            assert start.tools
            assert await environment.step(action("7")) == Observation((), True)
            server.send_signal(signal.SIGKILL)
            server.wait()
            with pytest.raises(EnvironmentFailure, match="crash: /reward"):
                await environment.reward({})
            await environment.close()
            with pytest.raises(EnvironmentFailure, match="crash: /reset: ClientConnectorError"):
                await ServiceEnvironment(url, 5, 0).reset({})

        asyncio.run(story())


async def refused(answer) -> tuple[str, str]:
    async with answering(web.post("/reset", answer)) as url:
        environment = ServiceEnvironment(url, 5, 0)
        with pytest.raises(EnvironmentFailure) as caught:
            await environment.reset({"label": 1})
        await environment.close()
        return caught.value.kind, caught.value.reason


@pytest.mark.parametrize(
    ("response", "kind", "reason"),
    [
        ({"text": "hello"}, "error", "the answer to /reset is not JSON"),
        ({"text": "[1]"}, "error", "the answer is [1], expected an object"),
        ({"text": '{"messages": [{"role": "user", "content": "a"}]}'}, "error", "'session' is None, expected a text"),
        ({"text": '{"messages": "a"}'}, "error", "'messages' is 'a'"),
        ({"text": '{"messages": [{"role": "user", "content": "\\ud800"}]}'}, "error", "half a character"),
        ({"text": "down", "status": 503}, "crash", "/reset: HTTP 503: down"),
        ({"text": "no", "status": 403}, "error", "/reset: HTTP 403: no"),
        ({"text": "{", "status": 500, "content_type": "application/json"}, "crash", "/reset: HTTP 500: {"),
        ({"status": 302, "headers": {"Location": "http://other"}}, "error", "redirects to 'http://other'"),
        ({"body": b"1" * (17 << 20)}, "error", "/reset: an answer of more than"),
    ],
)
def test_what_is_no_answer_is_a_failure(response, kind: str, reason: str):
    async def answer(request):
        return web.Response(**response)

    found = asyncio.run(refused(answer))
    assert found[0] == kind
    assert reason in found[1]


def test_a_request_is_never_sent_twice():
    """Not even where the connection breaks before the answer, at which HTTP clients like to try again."""
    seen = []

    async def answer(request):
        seen.append(await request.read())
        request.transport.abort()
        return web.Response()

    kind, reason = asyncio.run(refused(answer))
    assert (kind, len(seen)) == ("crash", 1)
    assert reason.startswith("/reset: ")


def test_what_is_no_environment_is_not_served():
    for word, text in (("calculater", "neither path.py:Class nor"), ("missing.py:Guess", "environment-unreadable")):
        ended = subprocess.run([*SERVE, word], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode
        assert text in ended.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("http://node7:8400", ServiceEnvironment),
        ("openenv+http://node7:8400", OpenEnvEnvironment),
        ("nemo_gym+https://node7:8400", NemoGymEnvironment),
        ("calculator", PooledEnvironment),
    ],
)
def test_the_kind_is_chosen_by_the_name(name: str, kind: type):
    words = {"model": "tiny", "site": "local", "set": f"data.environment={name} data.reward=environment"}

    async def opened():
        with environments_of(merge(words, ROOT / "config").config) as environments:
            return await environments.open(0)

    assert type(asyncio.run(opened())) is kind


def test_a_deadline_that_programs_exceed_is_rejected_at_the_start() -> None:
    done = subprocess.run([*SERVE, "python", "--deadline-seconds", "59"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--deadline-seconds 59: programs of python need 60" in done.stderr

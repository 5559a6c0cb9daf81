"""A real sandbox service on loopback, and its client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
import pytest
from aiohttp import web
from tests.support.rejections import rejected

from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE, SandboxSettings
from posttrain.sandbox.client import SandboxClient, runner_of
from posttrain.sandbox.messages import answer_of, read_answer, read_request, request_of
from posttrain.sandbox.program import Limits, Program, Result, SandboxUnavailable
from posttrain.sandbox.run import run
from posttrain.sandbox.service import make_application

SECRET = "a-secret-of-this-test"
SOURCE = "import sys\nprint(input())\nprint(open('x').read(), file=sys.stderr)"
PROGRAM = Program(SOURCE, stdin=b"hi\xff\n", files={"x": b"\x00y"})
LIMITS = Limits()


@contextmanager
def served(**variables: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a service that runs as a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "posttrain.sandbox.serve", "--port", str(port)]
    environment = {**os.environ, SANDBOX_SECRET_VARIABLE: SECRET, **variables}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr
            line = b""
            while b"ready on" not in line:
                line = process.stderr.readline()
                assert line
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as (where, _):
        yield where


def asked(address: str, program: Program, limits: Limits = LIMITS, secret: str = SECRET) -> Result:
    return asyncio.run(SandboxClient(address, secret).run(program, limits))


@pytest.mark.parametrize(
    "program",
    [
        PROGRAM,
        Program("while True: print('x' * 999)"),
        Program("import sys; sys.exit(4)"),
        Program(argv=("python", "-V")),
    ],
)
def test_a_service_answers_what_a_sandbox_here_answers(address: str, program: Program) -> None:
    here, there = asyncio.run(run(program, Limits())), asked(address, program)
    assert dataclasses.replace(there, seconds=0) == dataclasses.replace(here, seconds=0)
    assert there.seconds > 0


def test_a_configuration_says_where_programs_run(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner_of(SandboxSettings()) is run
    monkeypatch.setenv(SANDBOX_SECRET_VARIABLE, SECRET)
    client = runner_of(SandboxSettings(address=address))
    assert asyncio.run(client(Program("print(1)"), Limits())).stdout == b"1\n"


@pytest.mark.parametrize("value", ["", "two\nlines", "ümlaut"])
def test_a_client_needs_the_secret(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SANDBOX_SECRET_VARIABLE, value)
    with rejected("secret-not-set", key=SANDBOX_SECRET_VARIABLE):
        runner_of(SandboxSettings(address="http://node:1"))


def test_who_does_not_show_the_secret_runs_nothing(address: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"HTTP 401.*the request lacks the secret"):
        asked(address, PROGRAM, secret="another")
    assert httpx2.post(f"{address}/run", json={}).status_code == 401
    assert httpx2.get(address).status_code == 401


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda message: [], "not a request"),
        (lambda message: {**message, "stdin": "!"}, "base64"),
        (lambda message: {**message, "files": {"../x": ""}}, "not a path"),
        (lambda message: {**message, "argv": ["python"]}, "either Python source or a command"),
        (lambda message: {**message, "limits": {}}, "not a request"),
        (lambda message: {**message, "limits": {**message["limits"], "seconds": 1e9}}, "seconds=1000000000.0"),
        (lambda message: {**message, "limits": {**message["limits"], "processes": 0}}, "processes=0"),
        (lambda message: {**message, "limits": {**message["limits"], "seconds": float("nan")}}, "seconds=nan"),
    ],
)
def test_what_is_no_request_is_refused(address: str, change: Callable[[Any], Any], reason: str) -> None:
    message = change(request_of(PROGRAM, Limits()))
    answer = httpx2.post(f"{address}/run", content=json.dumps(message), headers={"Authorization": f"Bearer {SECRET}"})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_a_program_ends_with_its_client(address: str) -> None:
    async def leave() -> None:
        task = asyncio.create_task(
            SandboxClient(address, SECRET).run(Program("import time; time.sleep(300)"), Limits(300))
        )
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    service = next(child for child in children if "posttrain.sandbox.serve" in child.cmdline())
    asyncio.run(leave())
    until = time.monotonic() + 10
    while service.children() and time.monotonic() < until:
        time.sleep(0.05)
    assert not service.children()


def test_nothing_is_left_of_a_service_that_is_killed() -> None:
    async def ask_and_kill() -> list[psutil.Process]:
        with served() as (address, process):
            client = SandboxClient(address, SECRET)
            task = asyncio.create_task(client.run(Program("import time; time.sleep(300)"), Limits(300)))
            await asyncio.sleep(1)
            below = psutil.Process(process.pid).children(recursive=True)
            assert below
            process.kill()
            with pytest.raises(SandboxUnavailable, match="no answer from the sandbox service"):
                await task
            return below

    _, alive = psutil.wait_procs(asyncio.run(ask_and_kill()), timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_programs_wait_for_their_turn() -> None:
    running, most = 0, 0

    async def counted(program: Program, limits: Limits) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Result("exit", 0, b"", b"", (), 0.1)

    asyncio.run(ask_application(make_application(SECRET, 2, counted), 6))
    assert most == 2


def test_a_service_without_sandbox_says_so() -> None:
    async def cannot(program: Program, limits: Limits) -> Result:
        raise SandboxUnavailable("allow user namespaces")

    with pytest.raises(SandboxUnavailable, match=r"HTTP 503.*allow user namespaces"):
        asyncio.run(ask_application(make_application(SECRET, 2, cannot), 1))


async def ask_application(application: web.Application, times: int) -> None:
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = SandboxClient(f"http://127.0.0.1:{runner.addresses[0][1]}", SECRET)
    try:
        await asyncio.gather(*(client.run(PROGRAM, Limits()) for _ in range(times)))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("change", [{"ended": "won"}, {"stdout": 5}, {"exit_code": "x"}, {"truncated": None}])
def test_a_nonsensical_answer_is_no_result(change: dict[str, Any]) -> None:
    answer = answer_of(Result("exit", 0, b"a", b"", ("stdout",), 1.5))
    assert read_answer(answer) == Result("exit", 0, b"a", b"", ("stdout",), 1.5)

    async def serve_nonsense() -> None:
        async def answering(request: web.Request) -> web.Response:
            return web.json_response({**answer, **change})

        application = web.Application()
        application.router.add_post("/run", answering)
        await ask_application(application, 1)

    with pytest.raises(SandboxUnavailable, match="no answer"):
        asyncio.run(serve_nonsense())


def test_a_request_is_read_as_it_was_written() -> None:
    limits = Limits(1.5, 64, 3, 7, 9, 11)
    assert read_request(request_of(PROGRAM, limits)) == (PROGRAM, limits)

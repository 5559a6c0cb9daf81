"""Programs that try to leave their sandbox or its limits: each succeeds without the sandbox, and fails in it.

"Without" is a disposable set of namespaces with all capabilities, where nothing outside of the test can be reached that
the test has not made.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.sandbox_abuses import ABUSES, SLOW, program_of

from posttrain.sandbox.bubblewrap import find_bwrap
from posttrain.sandbox.program import Limits, Program
from posttrain.sandbox.python_root import find_python
from posttrain.sandbox.run import run_sync

LIMITS = Limits(seconds=1.5, memory_mib=128, processes=8, output_kib=16, files=200)
SECRET = "a-secret-of-this-test"
BYSTANDER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
# Starts a bystander in the disposable namespaces, then the program.
DISPOSABLE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
command = [sys.executable, "-S", "-c", "import time; time.sleep(600)", os.environ["PROBE_MARK"]]
with subprocess.Popen(command) as bystander:
    try:
        command = [sys.executable, "-S", "-B", "-"]
        done = subprocess.run(command, input=sys.stdin.buffer.read(), close_fds=False, timeout=30)
    finally:
        bystander.kill()
sys.exit(done.returncode)
"""


@dataclass(frozen=True)
class Outside:
    """What the programs look for.

    Args:
        folder: Holds a secret and a socket.
        port: Answers.
        mark: Names the bystander and a socket.
        bystander: Another process.
        number: An inheritable file descriptor of the secret.
    """

    folder: Path
    port: int
    mark: str
    bystander: subprocess.Popen[bytes]
    number: int


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder, mark = tmp_path_factory.mktemp("outside"), f"bystander-{uuid.uuid4()}"
    (folder / "secret").write_text(SECRET)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagram = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagram.bind(stream.getsockname())
        threading.Thread(target=answer_datagrams, args=[datagram], daemon=True).start()
        listeners = [stream]
        for name in (f"{folder}/socket", f"\0{mark}"):
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(name)
            listeners[-1].listen()
        for listener in listeners:
            threading.Thread(target=answer_connections, args=[listener], daemon=True).start()
        secret = stack.enter_context(open(folder / "secret", "rb"))
        os.set_inheritable(secret.fileno(), True)
        environment = {**os.environ, "PROBE_SECRET": SECRET}
        bystander = stack.enter_context(subprocess.Popen([*BYSTANDER, mark], env=environment))
        stack.callback(bystander.kill)
        yield Outside(folder, stream.getsockname()[1], mark, bystander, secret.fileno())


def answer_connections(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as peer:
                peer.send(b"hello")


def answer_datagrams(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.sendto(b"hello", listener.recvfrom(9)[1])


def run_without(program: str, outside: Outside) -> str:
    """Return what a program prints in disposable namespaces without limits."""
    words = [find_bwrap(), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--uid", "0", "--gid", "0", "--cap-add", "ALL", "--die-with-parent", "--dev-bind", "/", "/"]
    words += ["--proc", "/proc", "--dev-bind", "/proc/sys", "/proc/sys", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp"]
    words += ["--bind", str(outside.folder), str(outside.folder), "--tmpfs", "/mnt", "--chdir", "/mnt"]
    words += ["--", find_python().python, "-S", "-B", "-c", DISPOSABLE]
    options = {
        "env": {**os.environ, "PROBE_SECRET": SECRET, "PROBE_MARK": outside.mark},
        "pass_fds": [outside.number],
    }
    done = subprocess.run(words, input=program.encode(), capture_output=True, timeout=60, check=False, **options)
    return done.stdout.decode() + done.stderr.decode()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.faults("sandbox")) if name in SLOW else name for name in ABUSES]
)
def test_an_abuse_is_contained(name: str, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(name, str(outside.folder), outside.port, outside.mark)
    said = run_without(program, outside)
    assert "\ndone\n" in said, f"it fails without a sandbox, too: {said[-1000:]}"
    monkeypatch.setenv("PROBE_SECRET", SECRET)
    result = run_sync(Program(program), LIMITS)
    assert b"\ndone\n" not in result.stdout
    assert not result.is_success
    assert b"SyntaxError" not in result.stderr
    assert b"NameError" not in result.stderr
    assert outside.bystander.poll() is None
    assert (outside.folder / "secret").read_text() == SECRET
    assert sorted(path.name for path in outside.folder.iterdir()) == ["secret", "socket"]


def test_there_are_enough() -> None:
    assert len(ABUSES) >= 40


def test_a_harmless_program_is_done(outside: Outside) -> None:
    program = program_of("reads the users", "", 0, "").replace("assert open('/etc/passwd').read()", "")
    assert run_sync(Program(program), LIMITS).stdout == b"\ndone\n"

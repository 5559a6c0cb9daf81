"""An engine in the foreground ends with who started it, and who is told to end does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import EMBEDDED
from posttrain_serving.foreground import ENDING, serve_in_foreground, told_to_end
from posttrain_serving.launch import Process

HEALTHY = """
import http.server, subprocess, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
subprocess.Popen(["sleep", "300"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
IN_FOREGROUND = """
import logging, sys
from posttrain_serving.foreground import serve_in_foreground, told_to_end
from posttrain_serving.launch import Process
logging.basicConfig(level=logging.INFO)
with told_to_end():
    process = Process("it", (sys.executable, "-c", sys.argv[1], sys.argv[2]), ())
    sys.exit(serve_in_foreground(process, sys.argv[3], None, "bf16", 60))
"""


def engine(code: str) -> Process:
    return Process("it", (sys.executable, "-c", code, EMBEDDED), ())


def test_one_that_ends_before_it_is_ready_is_told() -> None:
    (port,) = choose_free_ports(1)
    with pytest.raises(RuntimeError, match="ended with exit code 7 before it was ready"):
        serve_in_foreground(engine("raise SystemExit(7)"), f"http://127.0.0.1:{port}", None, "bf16", 60)


def test_one_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    (port,) = choose_free_ports(1)
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    with pytest.raises(RuntimeError, match="is not ready after 5 s"):
        serve_in_foreground(engine(code), f"http://127.0.0.1:{port}", None, "bf16", 5)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("code", "ends"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_part_that_answers_nobody_ends_as_its_engine(code: str, ends: int) -> None:
    assert serve_in_foreground(engine(code), "", None, "bf16", 60) == ends


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.faults("slow")) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_all_end_with_the_foreground(tmp_path: Path, number: signal.Signals) -> None:
    def hears_all() -> None:  # also where these tests run behind `&`
        for one in ENDING:
            signal.signal(one, signal.SIG_DFL)

    (port,), log = choose_free_ports(1), tmp_path / "log"
    with log.open("wb") as output:
        words = [sys.executable, "-c", IN_FOREGROUND, HEALTHY, str(port), f"http://127.0.0.1:{port}"]
        process = subprocess.Popen(words, stdout=output, stderr=output, preexec_fn=hears_all)
    while "healthy at" not in log.read_text():
        assert process.poll() is None, log.read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("sleep" in one.name() for one in family)
    process.send_signal(number)
    assert process.wait(30) == (-9 if number == signal.SIGKILL else 128 + number)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_what_a_shell_ignores_stays_ignored() -> None:
    ignored = {one: signal.SIG_IGN if one == signal.SIGHUP else signal.SIG_DFL for one in ENDING}
    before = {one: signal.signal(one, handler) for one, handler in ignored.items()}
    try:
        with told_to_end():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert all(signal.getsignal(one) is not signal.SIG_IGN for one in ENDING if one != signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

"""Which process somebody was, against what psutil says."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys

import psutil
import pytest

from posttrain.store.processes import process_ids, started_ticks, user_name

# Its name looks like the end of a name and a state.
NAMED = """
import sys
open("/proc/self/comm", "w").write("a) Z 1 (b")
print("named", flush=True)
sys.stdin.readline()
"""


def test_when_a_process_started() -> None:
    child = subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"named\n"
    since_boot = psutil.Process(child.pid).create_time() - psutil.boot_time()
    assert started_ticks(child.pid) == pytest.approx(since_boot * os.sysconf("SC_CLK_TCK"), abs=2)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started_ticks(child.pid) is None, "a zombie does not run"
    child.communicate()
    assert started_ticks(child.pid) is None


def test_one_that_started_later_started_later() -> None:
    assert started_ticks(1) < started_ticks(os.getpid())


def test_ids_mean_the_same_in_every_process_of_one_namespace() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "from posttrain.store.processes import process_ids; print(process_ids())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found == f"{process_ids()}\n"
    boot, namespace = process_ids().split()
    assert len(boot) == 36
    assert namespace == os.readlink("/proc/self/ns/pid")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for another set of process ids")
def test_elsewhere_they_do_not() -> None:
    command = [sys.executable, "-c", "from posttrain.store.processes import process_ids; print(process_ids())"]
    found = subprocess.run(["unshare", "--pid", "--fork", *command], capture_output=True, text=True, check=True).stdout
    assert found.split()[0] == process_ids().split()[0]
    assert found.strip() != process_ids()


def test_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_name() == getpass.getuser()

    def unknown() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert user_name() == str(os.getuid())

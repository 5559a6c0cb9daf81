"""Processes end with the one that wanted them, although a shell stands between the two, and with their families."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from posttrain.cluster.processes import die_with_parent, end_processes, start_child

STEP = """
import time
from posttrain.cluster.processes import follow_driver
follow_driver()
print("up", flush=True)
time.sleep(60)
"""
DRIVER = """
import subprocess, sys
from posttrain.cluster.processes import name_driver
name_driver()
shell = subprocess.Popen(["bash", "-c", f"{sys.executable} {sys.argv[1]}; true"], stdout=subprocess.PIPE, text=True)
shell.stdout.readline()
print(shell.pid, flush=True)
shell.wait()
"""
PARENT = """
import os, subprocess
from functools import partial
from posttrain.cluster.processes import die_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=partial(die_with_parent, os.getpid()))
print(child.pid, flush=True)
child.wait()
"""

SCRATCH = """
import subprocess, sys, tempfile, time
from posttrain.cluster.processes import scratch_folder
with scratch_folder("scratch-") as folder:
    # A child that writes a little longer than this process lives.
    subprocess.Popen(["sh", "-c", f"for i in 1 2 3 4 5; do echo $i > {folder}/$i; sleep 0.1; done"])
    assert tempfile.mkdtemp().startswith(str(folder))
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_nothing_is_left_of_a_scratch_folder(tmp_path: Path, is_killed: bool) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    owner = subprocess.Popen([sys.executable, "-c", SCRATCH], env=environment, text=True, **pipes)
    folder = Path(owner.stdout.readline().strip())
    assert folder.parent == tmp_path
    assert folder.is_dir()
    if is_killed:
        owner.kill()
    owner.communicate("\n" if not is_killed else None)
    give_up = time.monotonic() + 10
    while folder.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert [*tmp_path.iterdir()] == []


def test_a_killed_driver_takes_its_steps_along(tmp_path: Path) -> None:
    step = tmp_path / "step.py"
    step.write_text(STEP)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(step)], stdout=subprocess.PIPE, text=True)
    shell = psutil.Process(int(driver.stdout.readline()))
    processes = [shell, *shell.children()]
    assert len(processes) == 2
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def test_a_step_whose_driver_is_gone_does_not_start(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = {**os.environ, "POSTTRAIN_DRIVER": f"{socket.gethostname()}:{gone.pid}"}
    step = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, timeout=20, check=False)
    assert step.returncode != 0
    assert b"up" not in step.stdout


def test_a_driver_on_another_host_is_not_followed(tmp_path: Path) -> None:
    script = STEP.replace("time.sleep(60)", "")
    environment = {**os.environ, "POSTTRAIN_DRIVER": "elsewhere:1"}
    step = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=20, check=False)
    assert step.stdout == b"up\n"


def test_a_child_ends_with_the_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert not alive


def test_a_parent_that_died_too_early_is_noticed() -> None:
    """The kernel tells of deaths to come only: whoever is somebody else's child by then ends itself."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    orphan = subprocess.Popen(["sleep", "60"], preexec_fn=partial(die_with_parent, gone.pid))
    assert orphan.wait(timeout=5) == -signal.SIGKILL


WITH_CHILD = """
import subprocess, sys, time
if sys.argv[1] == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""
FAMILY = [sys.executable, "-m", "posttrain.cluster.processes"]


def start_family(*command: str, stubborn: bool = False) -> tuple[psutil.Popen, list[psutil.Process]]:
    """Start a process with a child, and return it with all members of the family."""
    words = [*command, sys.executable, "-c", WITH_CHILD, "stubborn" if stubborn else ""]
    root = start_child(words, stdout=subprocess.PIPE, text=True)
    psutil.Process(int(root.stdout.readline()))
    return root, [root, *root.children(recursive=True)]


@pytest.mark.parametrize("stubborn", [False, True])
def test_families_are_ended_and_nobody_else(stubborn: bool) -> None:
    bystander = start_child(["sleep", "60"])
    pairs = [start_family(stubborn=stubborn), start_family()]
    members = [member for _, family in pairs for member in family]
    assert len(members) == 4
    end_processes([root for root, _ in pairs], grace_seconds=0.5)
    assert not any(member.is_running() for member in members)
    assert [root.poll() for root, _ in pairs] == [-signal.SIGKILL if stubborn else -signal.SIGTERM, -signal.SIGTERM]
    assert bystander.is_running()
    end_processes([bystander, *(root for root, _ in pairs)])


def test_a_command_that_has_its_family_ended_exits_as_it_does(tmp_path: Path) -> None:
    assert subprocess.run([*FAMILY, sys.executable, "-c", "import sys; sys.exit(7)"], check=False).returncode == 7
    absent = subprocess.run([*FAMILY, tmp_path / "absent"], capture_output=True, text=True, check=False)
    assert absent.returncode == 127
    assert "cannot be started" in absent.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_told_to_end_or_killed_takes_its_command_along(number: signal.Signals) -> None:
    root, members = start_family(*FAMILY)
    assert len(members) == 3
    root.send_signal(number)
    _, alive = psutil.wait_procs(members[:2], timeout=5)
    assert not alive
    if number == signal.SIGTERM:
        assert root.wait() == 143
        assert not members[2].is_running()
    else:
        members[2].kill()


def test_a_command_has_the_signals_that_its_starter_has_blocked() -> None:
    """SIGUSR1 is blocked in all processes of training, and must not end an engine; SIGTERM must."""
    blocked = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGUSR1})
    code = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    done = subprocess.run([*FAMILY, sys.executable, "-c", code], preexec_fn=blocked, stdout=subprocess.PIPE, check=True)
    assert done.stdout == f"{signal.SIGUSR1}\n".encode()

"""Steps end with the driver that wanted them, although a shell stands between the two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil

from posttrain.launch.child import die_with_parent

STEP = """
import time
from posttrain.launch.child import follow_driver
follow_driver()
print("up", flush=True)
time.sleep(60)
"""
DRIVER = """
import subprocess, sys
from posttrain.launch.child import name_driver
name_driver()
shell = subprocess.Popen(["bash", "-c", f"{sys.executable} {sys.argv[1]}; true"], stdout=subprocess.PIPE, text=True)
shell.stdout.readline()
print(shell.pid, flush=True)
shell.wait()
"""
PARENT = """
import os, subprocess
from functools import partial
from posttrain.launch.child import die_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=partial(die_with_parent, os.getpid()))
print(child.pid, flush=True)
child.wait()
"""


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

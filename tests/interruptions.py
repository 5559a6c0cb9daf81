"""Ends running workflows at points that can be seen from outside, and finds what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.workflow_runs import WorkflowFolder

POLL_SECONDS = 0.003
# A process that follows a dead driver ends at once; this is what the kernel and a busy machine may take.
GONE_SECONDS = 2.0

SUPERVISOR = "scripts/train_grpo.py"
TRAINER = "posttrain.launch.trainer_rank"
ENGINE = "posttrain.engines.embedded"


@dataclass
class Driver:
    """A running `snakemake` in a process group of its own, its output in a file.

    Args:
        workflow: Where it runs.
        process: The driver itself.
        log_path: What it and its steps print.
    """

    workflow: WorkflowFolder
    process: subprocess.Popen
    log_path: Path

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], object], timeout: float = 120) -> None:
        """Return when the condition holds; fails when the driver ends before, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the driver ended before the point was reached:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"the point was not reached:\n{self.output[-4000:]}"
            time.sleep(POLL_SECONDS)

    def wait_for(self, role: str) -> psutil.Process:
        """Return the first process of a role as soon as there is one."""
        self.wait_until(lambda: find_processes(self.workflow, role))
        return find_processes(self.workflow, role)[0]

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the driver alone, and wait for its end."""
        self.process.send_signal(number)
        self.process.wait(60)

    def finish(self, timeout: float = 300) -> tuple[int, str]:
        """Wait for the end; returns exit code and output."""
        try:
            self.process.wait(timeout)
        finally:
            self.process.kill()
        return self.process.returncode, self.output


def start(workflow: WorkflowFolder, *targets: str, options: tuple[str, ...] = ()) -> Driver:
    """Start a workflow whose end the test decides."""
    workflow.folder.mkdir(parents=True, exist_ok=True)
    number = len(list(workflow.folder.glob("driver*.log"))) + 1
    log_path = workflow.folder / f"driver{number:03d}.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            workflow.command(*targets, options=options),
            cwd=workflow.folder,
            env=workflow.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Driver(workflow, process, log_path)


def processes_of(workflow: WorkflowFolder) -> list[psutil.Process]:
    """Return every living process that works in the workflow's folder, whoever started it."""
    return [process for process in psutil.process_iter() if _works_in(process, workflow.folder)]


def find_processes(workflow: WorkflowFolder, word: str) -> list[psutil.Process]:
    """Return the Python processes of a workflow whose command line holds a word, a script or a module."""
    return [process for process in processes_of(workflow) if _runs(process, word)]


def assert_gone(workflow: WorkflowFolder, seconds: float = GONE_SECONDS) -> None:
    """Fail when a process of the workflow still lives after so many seconds."""
    deadline = time.monotonic() + seconds
    while left := processes_of(workflow):
        assert time.monotonic() < deadline, [(p.pid, p.cmdline()[:8]) for p in left]
        time.sleep(POLL_SECONDS)


def tree_state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of everything below a folder: two equal states, and nobody wrote."""
    state = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            state[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
    return state


def digest_of(folder: Path) -> str:
    """Return a hash of the names and bytes of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return bool(command) and "python" in Path(command[0]).name and any(part.endswith(word) for part in command[1:4])

"""A real SLURM of several nodes on this machine (slurm_localhost.sh), for tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import psutil
from tests.support.requirements import require

SCRIPT = Path(__file__).with_name("slurm_localhost.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "ip", "nsenter", "unshare")
# A short path: munge's socket has at most 107 bytes.
FOLDER = Path("/var/tmp/posttrain-slurm-tests")
SYSTEM_FOLDERS = "/usr/sbin:/sbin"


@dataclass(frozen=True)
class Cluster:
    """The running cluster.

    Args:
        folder: Its files.
        cut_nodes: Nodes whose power was cut since somebody has emptied this.
    """

    folder: Path
    cut_nodes: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> list[str]:
        """All nodes, those without power too."""
        return sorted(set(self.ask("sinfo", "--noheader", "--Node", "--format", "%N").split()))

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def cut_power(self, node: str) -> None:
        """End all processes of a node at once, SLURM's own included."""
        self.cut_nodes.add(node)
        self._run("kill", node)

    def bring_back(self, node: str) -> None:
        """Start a node whose power was cut."""
        self._run("start", node)

    @contextmanager
    def without(self, node: str) -> Iterator[None]:
        """Cut a node's power, and bring it back at the end of the block."""
        self.cut_power(node)
        try:
            yield
        finally:
            self.bring_back(node)

    def start_on(self, node: str, *command: object) -> subprocess.Popen:
        """Start a program on a node, beside SLURM: it sees the node's disk, network and processes."""
        (shell,) = psutil.Process(int((self.folder / f"run/slurmd-{node}.pid").read_text())).children()
        inside = ["nsenter", "--target", str(shell.pid), "--mount", "--net", "--uts", "--pid"]
        return subprocess.Popen([*inside, *map(str, command)], stdin=subprocess.DEVNULL)

    def call_on(self, node: str, *command: object) -> None:
        """Run a program on a node."""
        assert self.start_on(node, *command).wait(60) == 0, command

    def wipe(self, node: str) -> None:
        """Delete everything on a node's own disk."""
        for path in (self.folder / "nodes" / node / "local_nvme").iterdir():
            shutil.rmtree(path)

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM prints."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that run or wait."""
        return self.ask("squeue", "--noheader", "--format", "%i").split()

    def state(self, job: str) -> str:
        """Return SLURM's word for where a job is."""
        return self.ask("squeue", "--noheader", "--states", "all", "--jobs", job, "--format", "%T")

    def end_in(self, job: str, seconds: float) -> None:
        """Move the end of a job's time."""
        end = datetime.now() + timedelta(seconds=seconds)
        self.ask("scontrol", "update", f"JobId={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")

    def wait_until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Return when something holds that SLURM is asked about."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.ask("squeue") + self.ask("sinfo")
            time.sleep(0.5)

    def wait_until_queued(self, job: str) -> None:
        """Return when a job waits in the queue."""
        self.wait_until(lambda: self.state(job) == "PENDING")

    def wait_until_idle(self) -> None:
        """Return when no node has a job or is away."""
        states = ("sinfo", "--noheader", "--Node", "--format", "%T")
        self.wait_until(lambda: set(self.ask(*states).split()) == {"idle"})

    def start_now(self, job: str) -> None:
        """Let a job that was put back into the queue start without the two minutes that SLURM waits."""
        time.sleep(5.0)  # sooner, the nodes refuse it: they have not forgotten its last run
        if self.state(job) == "PENDING":
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _run(self, *words: str) -> None:
        environment = {**os.environ, "SLURM_LOCALHOST": str(self.folder), "PATH": _path()}
        # Its output is a file: the daemons that it starts would keep a pipe open.
        with open(self.folder / "script.log", "ab") as log:
            done = subprocess.run(["bash", SCRIPT, *words], env=environment, stdout=log, stderr=log, timeout=120)
        assert done.returncode == 0, (self.folder / "script.log").read_text()[-2000:]


def missing_slurm() -> str:
    """Return why the cluster cannot run here; empty where it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if missing:
        return f"missing {', '.join(missing)}: make env-slurm"
    return "" if os.geteuid() == 0 else "nodes with networks of their own need root"


def require_slurm() -> None:
    """Skip the test where the cluster cannot run; fail it where REQUIRE asks for it."""
    require("slurm", missing_slurm())


@contextmanager
def running_cluster(nodes: int) -> Iterator[Cluster]:
    """Start a cluster and stop it, with all of its jobs, at the end of the block; there is one at a time."""
    cluster = Cluster(FOLDER)
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster._run("down")  # what a killed session has left
        cluster._run("up", str(nodes))
        try:
            yield cluster
        finally:
            cluster._run("down")


def _path() -> str:
    return f"{os.environ['PATH']}:{SYSTEM_FOLDERS}"

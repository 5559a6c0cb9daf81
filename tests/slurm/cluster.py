"""A real SLURM of several nodes on this machine (slurm_localhost.sh), for tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

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
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def cut_power(self, node: str) -> None:
        """End all processes of a node at once, SLURM's own included."""
        self._run("kill", node)

    def bring_back(self, node: str) -> None:
        """Start a node whose power was cut."""
        self._run("start", node)

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM prints."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that run or wait."""
        return self.ask("squeue", "--noheader", "--format", "%i").split()

    def wait_until_queued(self, job: str, seconds: float = 120) -> None:
        """Return when a job waits in the queue."""
        deadline = time.monotonic() + seconds
        while self.ask("squeue", "--noheader", "--jobs", job, "--format", "%T") != "PENDING":
            assert time.monotonic() < deadline, self.ask("squeue")
            time.sleep(0.2)

    def start_now(self, job: str) -> None:
        """Let a job that was put back into the queue start without the two minutes that SLURM waits."""
        time.sleep(5.0)  # sooner, the nodes refuse it: they have not forgotten its last run
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
    if reason := missing_slurm():
        pytest.fail(reason) if "slurm" in os.environ.get("REQUIRE", "") else pytest.skip(reason)


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

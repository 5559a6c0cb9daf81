"""Training inside a SLURM job: its nodes, its end, its place in the queue.

Snakemake's executor takes most SLURM_* variables away before a job's command runs, so that everything but the job's id
is asked of SLURM itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from posttrain.cluster.container import srun_options, wrap
from posttrain.cluster.nodes import (
    FIRST_PORT,
    LOOPBACK,
    NodesLostError,
    StartedHere,
    interface_address,
    start_here,
)
from posttrain.cluster.processes import end_processes, start_child
from posttrain.cluster.slurm_query import ask
from posttrain.cluster.slurm_scheduler import SlurmScheduler
from posttrain.cluster.spare_jobs import SpareJobs
from posttrain.config.derived import nodes_with_spares
from posttrain.config.schema import Config

log = logging.getLogger(__name__)

# srun starts a command in a second where the node answers; training stands still meanwhile.
PROBE_SECONDS = 15.0
# Enough that one of them is not lost together with the first node.
NUM_WATCHDOGS = 2
# From FIRST_PORT on, up to where ports of outgoing connections begin: a block for each job. Jobs of
# one node would have to be as many numbers apart as there are blocks to get the same one.
PORT_BLOCKS, PORTS_PER_BLOCK = 120, 100


class SlurmAllocation:
    """The nodes of the job that this process runs in.

    Args:
        job_id: SLURM's number of the job.
        names: Its nodes, spare ones included; this process runs on the first.
        config: The resolved configuration.
        run_folder: `train/` of the run.
    """

    def __init__(self, job_id: str, names: Sequence[str], config: Config, run_folder: Path):
        self._job_id, self._names, self._config = job_id, list(names), config
        self._lost: set[str] = set()
        self._spare_jobs = SpareJobs(config, job_id, self._names, run_folder)
        # Nodes that came later -> the jobs that hold them.
        self._new: dict[str, str] = {}
        self._watchdogs: StartedHere | None = None
        self.scheduler = SlurmScheduler(job_id, config.site.slurm.requeue, self._spare_jobs)
        self.first_port = FIRST_PORT + int(job_id) % PORT_BLOCKS * PORTS_PER_BLOCK
        self.address = interface_address(config.site.network_interface) if len(names) > 1 else LOOPBACK

    @staticmethod
    def of_this_job(config: Config, run_folder: Path) -> SlurmAllocation:
        """Return the allocation of the job that this process runs in.

        Args:
            config: The resolved configuration.
            run_folder: `train/` of the run.

        Raises:
            RuntimeError: It runs in none.
        """
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if not job_id:
            raise RuntimeError(
                "site.launcher=slurm, but this is no SLURM job; use --workflow-profile .../profiles/slurm"
            )
        nodes = ask("squeue", "--noheader", "--jobs", job_id, "--format", "%N")
        return SlurmAllocation(job_id, ask("scontrol", "show", "hostnames", nodes).split(), config, run_folder)

    def choose(self, count: int) -> list[str]:
        """Return the first nodes that are not lost, those that came later behind the job's own.

        Raises:
            NodesLostError: Fewer are left.
        """
        self._new = self._spare_jobs.nodes()
        names = [*self._names, *self._new]
        left = [name for name in names if name not in self._lost]
        if len(left) < count:
            lost = ", ".join(sorted(self._lost)) or "none was lost"
            raise NodesLostError(
                f"training needs {count} nodes, and {len(left)} of the job's {len(names)} are left ({lost})"
            )
        return left[:count]

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> StartedHere:
        """Start a command on the nodes: with an srun for each job, or directly where there is no other and no image."""
        self._start_watchdogs()
        parts = [list(part) for _, part in itertools.groupby(names, self._job_of)]
        if self._config.site.container.runtime != "none":
            for part in parts:
                self._make_node_local(part)
        with open(log_path, "ab") as sink:
            return start_here([self.words(part, command) for part in parts], environment, sink)

    def words(self, names: Sequence[str], command: Sequence[str]) -> list[str]:
        """Return what starts a command on the nodes, in the site's image where it has one."""
        if len(self._names) == 1 and self._config.site.container.runtime == "none":
            return [*command, "--name", *names]
        return [*self._srun(names), *srun_options(self._config), *wrap(command, self._config)]

    def check(self, names: Sequence[str]) -> list[str]:
        """Return which nodes do not run a command in time, and do not choose them again."""
        probes = {name: start_child([*self._srun([name]), "true"], stderr=subprocess.DEVNULL) for name in names}
        _, silent = psutil.wait_procs(list(probes.values()), timeout=PROBE_SECONDS)
        end_processes(silent, 0)
        lost = [name for name, probe in probes.items() if probe.poll() != 0]
        if lost:
            self.leave_out(lost)
        return lost

    def leave_out(self, names: Sequence[str]) -> None:
        """Do not choose these nodes again, although they answer."""
        self._lost.update(names)
        self._spare_jobs.replace(self._lost)

    def _job_of(self, name: str) -> str:
        return self._new.get(name, self._job_id)

    def _start_watchdogs(self) -> None:
        """Have the job started again should its first node be lost, which SLURM does only without spare nodes."""
        others = [name for name in self._names[1:] if name not in self._lost][-NUM_WATCHDOGS:]
        runs = self._watchdogs is not None and self._watchdogs.is_running()
        if runs or not others or nodes_with_spares(self._config) == self._config.nodes:
            return
        command = [sys.executable, "-m", "posttrain.cluster.requeue_watchdog", "--job", self._job_id]
        self._watchdogs = start_here([[*self._srun(others), *command]], {})

    def _make_node_local(self, names: Sequence[str]) -> None:
        """Make the folder on the nodes' own disks: container runtimes mount only folders that exist."""
        # A node that does not answer now does not start anything afterwards, which the gang tells.
        with contextlib.suppress(subprocess.TimeoutExpired):
            words = [*self._srun(names), "mkdir", "-p", self._config.site.node_local]
            subprocess.run(words, timeout=PROBE_SECONDS, check=False)

    def _srun(self, names: Sequence[str]) -> list[str]:
        """Return srun with its options: one task on each of a job's nodes, beside whatever else runs in the job."""
        place = ("--jobid", self._job_of(names[0]), "--nodelist", ",".join(names), "--nodes", str(len(names)))
        shape = ("--ntasks", str(len(names)), "--ntasks-per-node", "1", "--cpu-bind", "none")
        return ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mem", "0", *place, *shape]

"""The allocation of a SLURM job: its nodes, processes and ports.

Snakemake's executor removes most SLURM_* variables before a job's command runs, so everything but the job's id is
queried from SLURM.
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

# srun starts a command within a second on a node that answers; training waits for the probe.
PROBE_SECONDS = 15.0
# Two, so that the loss of the first node and another one leaves a watchdog.
NUM_WATCHDOGS = 2
# One block of ports per job, from FIRST_PORT up to the ephemeral ports. Two jobs on one node share a block only if
# their numbers differ by a multiple of `PORT_BLOCKS`.
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
        # Node of a spare job -> its job.
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
            RuntimeError: This process does not run in a SLURM job.
        """
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if not job_id:
            raise RuntimeError(
                "site.launcher=slurm, but this is no SLURM job; use --workflow-profile .../profiles/slurm"
            )
        nodes = ask("squeue", "--noheader", "--jobs", job_id, "--format", "%N")
        return SlurmAllocation(job_id, ask("scontrol", "show", "hostnames", nodes).split(), config, run_folder)

    def choose(self, count: int) -> list[str]:
        """Return the first nodes that are not lost: the job's own, then those of spare jobs.

        Raises:
            NodesLostError: Fewer nodes are left.
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
        """Start a command on the nodes: with one srun per job, or directly for a single node without an image."""
        self._start_watchdogs()
        parts = [list(part) for _, part in itertools.groupby(names, self._job_of)]
        if self._config.site.container.runtime != "none":
            for part in parts:
                self._make_node_local(part)
        with open(log_path, "ab") as sink:
            return start_here([self.words(part, command) for part in parts], environment, sink)

    def words(self, names: Sequence[str], command: Sequence[str]) -> list[str]:
        """Return the command line that starts a command on the nodes, in the site's image if it has one."""
        if len(self._names) == 1 and self._config.site.container.runtime == "none":
            return [*command, "--name", *names]
        return [*self._srun(names), *srun_options(self._config), *wrap(command, self._config)]

    def check(self, names: Sequence[str]) -> list[str]:
        """Return the nodes that do not run a command in time, and never choose them again."""
        probes = {name: start_child([*self._srun([name]), "true"], stderr=subprocess.DEVNULL) for name in names}
        _, silent = psutil.wait_procs(list(probes.values()), timeout=PROBE_SECONDS)
        end_processes(silent, 0)
        lost = [name for name, probe in probes.items() if probe.poll() != 0]
        if lost:
            self.leave_out(lost)
        return lost

    def leave_out(self, names: Sequence[str]) -> None:
        """Never choose these nodes again, although they answer."""
        self._lost.update(names)
        self._spare_jobs.replace(self._lost)

    def _job_of(self, name: str) -> str:
        return self._new.get(name, self._job_id)

    def _start_watchdogs(self) -> None:
        """Start watchdogs that requeue the job if its first node is lost; SLURM does so only without `--no-kill`."""
        others = [name for name in self._names[1:] if name not in self._lost][-NUM_WATCHDOGS:]
        runs = self._watchdogs is not None and self._watchdogs.is_running()
        if runs or not others or nodes_with_spares(self._config) == self._config.nodes:
            return
        command = [sys.executable, "-m", "posttrain.cluster.requeue_watchdog", "--job", self._job_id]
        self._watchdogs = start_here([[*self._srun(others), *command]], {})

    def _make_node_local(self, names: Sequence[str]) -> None:
        """Make the folder on the nodes' own disks: container runtimes mount only existing folders."""
        # A node that does not answer here fails again at the start, where the gang reports it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            words = [*self._srun(names), "mkdir", "-p", self._config.site.node_local]
            subprocess.run(words, timeout=PROBE_SECONDS, check=False)

    def _srun(self, names: Sequence[str]) -> list[str]:
        """Return srun with its options: one task on each of a job's nodes, overlapping the job's other steps."""
        place = ("--jobid", self._job_of(names[0]), "--nodelist", ",".join(names), "--nodes", str(len(names)))
        shape = ("--ntasks", str(len(names)), "--ntasks-per-node", "1", "--cpu-bind", "none")
        return ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mem", "0", *place, *shape]

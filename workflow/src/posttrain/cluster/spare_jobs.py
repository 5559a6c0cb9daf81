"""Replaces used spare nodes; each replacement is a separate job in the queue.

SLURM starts a user's commands in any of the user's jobs, so a spare job's node is used like the training job's own. The
spare job ends with the training job (`spare_node`); this module submits, finds and cancels it. A training job itself
cannot grow: SLURM merges jobs only if the site sets `permit_job_expansion`.
"""

from __future__ import annotations

import getpass
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from posttrain.cluster.slurm_job import options_of_spare
from posttrain.cluster.slurm_query import ask
from posttrain.config.derived import nodes_with_spares
from posttrain.config.load import digest8
from posttrain.config.schema import Config

log = logging.getLogger(__name__)

WAITING_STATES = ("PENDING", "CONFIGURING")
FIELDS = ("%i", "%T", "%N")


class SpareJobs:
    """The spare jobs of a run; none unless `site.slurm.refill_spares` is set.

    Args:
        config: The resolved configuration.
        job_id: SLURM's number of the training job.
        names: The nodes of the training job.
        run_folder: `train/` of the run; distinguishes runs of the same name.
    """

    def __init__(self, config: Config, job_id: str, names: Sequence[str], run_folder: Path):
        self._config, self._job_id, self._names = config, job_id, names
        self._is_wanted = config.site.slurm.refill_spares and nodes_with_spares(config) > config.nodes
        self._log = run_folder / "attempts" / "spare-%j.log"
        self._name = f"{run_folder.parent.name}-spare-{digest8(os.path.realpath(run_folder))}"
        self._has_submitted = False
        # Job -> its node; "" while it waits for one.
        self._jobs: Mapping[str, str] = {}

    def nodes(self) -> dict[str, str]:
        """Return spare node -> its job, for jobs with a node; the last known result if SLURM does not answer."""
        try:
            self._look()
        except RuntimeError as error:
            log.warning("SLURM does not tell which spare nodes have come: %s", error)
        return {node: number for number, node in self._jobs.items() if node}

    def replace(self, lost: Set[str]) -> None:
        """Submit a spare job for each missing node; if SLURM rejects one, log a warning.

        Args:
            lost: All nodes that will not train again.
        """
        if not self._is_wanted:
            return
        try:
            self._look()
            useless = [number for number, node in self._jobs.items() if node in lost]
            self._cancel(useless)
            for _ in range(len(lost & set(self._names)) - len(self._jobs) + len(useless)):
                self._submit({*self._names, *self._jobs.values(), *lost} - {""})
        except RuntimeError as error:
            log.warning("a used-up spare node is not replaced through the queue: %s", error)

    def cancel_all(self) -> None:
        """Cancel all of the run's spare jobs, including those of earlier processes."""
        if self._is_wanted:
            try:
                self._cancel(list(self._find()))
            except RuntimeError as error:
                log.warning("jobs of spare nodes are left to end by themselves: %s", error)

    def _look(self) -> None:
        if self._has_submitted:
            self._jobs = self._find("--states", ",".join(("RUNNING", *WAITING_STATES)))

    def _submit(self, excluded: Set[str]) -> None:
        if not self._has_submitted:
            signal.signal(signal.SIGTERM, self._cancel_and_end)
            self._has_submitted = True
        left = ask("squeue", "--noheader", "--jobs", self._job_id, "--format", "%L")
        about = (f"--job-name={self._name}", f"--comment=a spare node of job {self._job_id}", f"--output={self._log}")
        holds = shlex.join([sys.executable, "-m", "posttrain.cluster.spare_node", "--job", self._job_id])
        words = [*about, f"--time={left}", *options_of_spare(self._config, excluded), f"--wrap={holds}"]
        number = ask("sbatch", "--parsable", "--export=ALL", *words)
        log.warning("job %s is in the queue for a new spare node", number.partition(";")[0])

    def _cancel(self, numbers: Sequence[str]) -> None:
        if numbers:
            ask("scancel", "--quiet", f"--user={getpass.getuser()}", f"--name={self._name}", *numbers)

    def _find(self, *options: str) -> dict[str, str]:
        asked = ("--me", "--noheader", f"--name={self._name}", *options, f"--format={'|'.join(FIELDS)}")
        return parse_jobs(ask("squeue", *asked))

    def _cancel_and_end(self, *_: object) -> None:
        """Cancel spare jobs, then end by SIGTERM, which SLURM sends before it cancels or requeues a job."""
        self.cancel_all()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def parse_jobs(listed: str) -> dict[str, str]:
    """Parse squeue's output to job -> node; "" while the job waits.

    Args:
        listed: A line per job, `FIELDS` joined by "|".
    """
    rows = (line.split("|") for line in listed.splitlines())
    return {number: "" if state in WAITING_STATES else node for number, state, node in rows}

"""A training over SLURM in which things go wrong, and what that has cost in the end."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import TRAINER, Driver, assert_same_training, find_processes, rank_process, start
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import FAST, WorkflowFolder

LOOK_SECONDS = 0.5
REACH_SECONDS = 240.0
# A pipeline stage and an engine on each of two nodes. They are not looked at first, which would make every start longer
# and the time of a restart, held against it, look shorter.
TWO_RANKS = FAST | {
    "launch.preflight": "false",
    "parallel.pipeline_model_parallel_size": 2,
    "engine.num_engines": 2,
    "engine.num_threads": 1,
    "engine.groups_per_request": 2,
}
SAVE_INTERVAL = 2


@dataclass(frozen=True)
class Event:
    """Something that went wrong.

    Args:
        kind: What, and when.
        unix: At what time.
        finished_steps: Of training by then.
        attempts: Begun by then.
    """

    kind: str
    unix: float
    finished_steps: int
    attempts: int


class DisturbedRun:
    """A training of two nodes.

    Args:
        workflow: Where.
        cluster: On which nodes.
    """

    def __init__(self, workflow: SlurmFolder, cluster: Cluster):
        self.workflow, self.cluster = workflow, cluster
        self.events: list[Event] = []
        self._started = time.monotonic()
        self._watch = RunWatch(workflow)
        self._watch.start()
        self.driver = self.start_driver()

    def start_driver(self) -> Driver:
        """Give the command, as a rule again."""
        self.driver = start(self.workflow, "train")
        return self.driver

    # ---- where it is ----

    @property
    def train(self) -> Path:
        return self.workflow.run_folder / "train"

    @property
    def job(self) -> str:
        """The only job in the queue."""
        (job,) = self.cluster.jobs()
        return job

    @property
    def attempts(self) -> list[Path]:
        """Folders of all attempts that have begun."""
        return sorted(self.workflow.results.glob("*/train/attempts/[0-9]*"))

    @property
    def nodes(self) -> list[str]:
        """The nodes of the present attempt, the head's first."""
        return sorted(path.stem.removeprefix("node-") for path in self.attempts[-1].glob("node-*.log"))

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        return rank_process(self.workflow, number)

    def rows(self) -> list[dict]:
        """Return the rows of all attempts whose head has lived to write one."""
        path = self.train / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition: Callable[[], object]) -> None:
        """Return when something holds."""
        self.driver.wait_until(condition, REACH_SECONDS)

    def wait_for_jobs(self, count: int) -> None:
        """Return when so many jobs are in the queue or run."""
        self.cluster.wait_until(lambda: len(self.cluster.jobs()) == count)

    def reach(self, point: str) -> None:
        """Return when a file or folder is in the training's folder."""
        self.wait(lambda: any(self.workflow.results.glob(f"*/train/{point}")))

    def reach_staging(self) -> None:
        """Return when the second node of a new attempt copies weights."""
        self.wait(lambda: self.attempts and len(self.nodes) == 2 and "the copy to" in self._node_log(self.nodes[1]))

    def _node_log(self, node: str) -> str:
        return (self.attempts[-1] / f"node-{node}.log").read_text(errors="replace")

    # ---- what happens to it ----

    def happens(self, kind: str) -> None:
        """Take note of what is about to go wrong."""
        path = self.train / "metrics.jsonl"
        finished = path.read_text().count("\n") if path.exists() else 0
        self.events.append(Event(kind, time.time(), finished, len(self.attempts)))

    def wait_for_next_attempt(self) -> None:
        """Return when the one that the last event has ended is followed by another."""
        self.wait(lambda: len(self.attempts) > self.events[-1].attempts)

    def finish(self) -> str:
        """Wait for the driver's good end; returns what it has printed."""
        code, output = self.driver.finish(timeout=500)
        assert code == 0, output[-4000:]
        return output

    def fail(self) -> str:
        """Wait for an end that asks for the same command again; returns what was printed and logged."""
        code, output = self.driver.finish(timeout=200)
        assert code == 1, output[-4000:]
        assert "Traceback" not in output, output[-4000:]
        (log,) = self.workflow.folder.glob("logs/train/*.log")
        return output + log.read_text(errors="replace")

    def abandon(self) -> None:
        """Leave nothing behind, also where a test has failed."""
        self._watch.end()
        self.driver.process.kill()
        self.driver.process.wait()

    # ---- what it has cost ----

    def check(self, undisturbed: WorkflowFolder, faults: FaultRecord) -> None:
        """Compare with the undisturbed run, and hold what was lost against what may be."""
        self._watch.end()
        assert_same_training(self.workflow, undisturbed)
        assert self._watch.made_twice() == []
        assert self._watch.most_trainers == 1
        for earlier, later in pairwise(self.rows()):
            assert earlier["ended_unix"] <= later["started_unix"]
            assert earlier["epoch"] <= later["epoch"]
        again = [self._steps_again(event) for event in self.events]
        assert max(again) <= SAVE_INTERVAL, again
        seconds = time.monotonic() - self._started
        faults.add_events(Counter(event.kind for event in self.events), seconds, steps_trained_again=max(again))
        faults.equal = True

    def recovery_seconds(self, event: Event) -> float:
        """Return how long after an event the next attempt began its first step."""
        row = self._row(event.attempts + 1)
        return row["started_unix"] + row["first_step_seconds"] - event.unix

    def plain_start_seconds(self) -> float:
        """Return how long after its start the first attempt began its first step."""
        return self._row(1)["first_step_seconds"]

    def _row(self, attempt: int) -> dict:
        (row,) = (row for row in self.rows() if row["attempt"] == attempt)
        return row

    def _steps_again(self, event: Event) -> int:
        """Return how many finished steps the attempt after an event has repeated."""
        later = [path for path in self.attempts if int(path.name) > event.attempts]
        if not later or not (log := later[0] / "trainer0.log").exists():
            return 0
        resumed = re.search(r"resuming after step (\d+)", log.read_text(errors="replace"))
        return max(0, event.finished_steps - (int(resumed[1]) if resumed else 0))


class RunWatch(threading.Thread):
    """Looks at a run all the time: which sample groups are made, and how many train it.

    Args:
        workflow: Where the run is.
    """

    def __init__(self, workflow: WorkflowFolder):
        super().__init__(daemon=True)
        self._workflow, self._end = workflow, threading.Event()
        self._versions: dict[Path, set[tuple[int, int]]] = {}
        self.most_trainers = 0

    def run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            # What is deleted or ends meanwhile is seen the next time.
            with contextlib.suppress(OSError, psutil.Error):
                self._look_at_groups()
            with contextlib.suppress(OSError, psutil.Error, KeyError):
                firsts = [p for p in find_processes(self._workflow, TRAINER) if p.environ()["RANK"] == "0"]
                self.most_trainers = max(self.most_trainers, len(firsts))

    def end(self) -> None:
        """Look no more."""
        self._end.set()
        self.join()

    def made_twice(self) -> list[Path]:
        """Return the files of sample groups that were written more than once."""
        return [path for path, versions in self._versions.items() if len(versions) > 1]

    def _look_at_groups(self) -> None:
        for path in self._workflow.results.glob("*/train/rollouts/step_*/chunk_*.json"):
            status = path.stat()
            self._versions.setdefault(path, set()).add((status.st_ino, status.st_mtime_ns))

"""One attempt of a training job: the head starts a supervisor on every node, connects them and monitors them.

Each node sends the head its name, then its engines' URLs, then what has ended. The head sends each node its assignment,
then the addresses of engines and ranks, then the end of the attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.cluster.flight_recorder import describe_records
from posttrain.cluster.hang import HangWatch, Position, describe_stacks
from posttrain.cluster.inspection import must_inspect
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.node_group import AttemptFailedError, NodeGroup
from posttrain.cluster.nodes import Allocation
from posttrain.cluster.preemption_deadline import PreemptionDeadline
from posttrain.config.derived import trainer_nodes
from posttrain.config.schema import Config
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.store.lease import Lease

log = logging.getLogger(__name__)

# A node answers within `ranks.STACK_SECONDS` even if its ranks do not. A node that itself hangs is named, too.
STACKS_SECONDS = 10.0


class HangError(AttemptFailedError):
    """Ranks made no progress and were ended."""


class EndedEarlyError(RuntimeError):
    """Training stopped early on request: it has saved, and has steps left."""


class Attempt(NodeGroup):
    """A context manager around one attempt: its processes end with the block.

    Args:
        job: The training job.
        config: The resolved configuration.
        nodes: The allocation that starts processes.
        names: The nodes of this attempt, in the order of ranks.
        folder: Gets the logs of the attempt.
        lease: The run's lease, held by this process.
        fit: Nodes that need no preflight; nodes that pass it are added.
    """

    def __init__(
        self,
        job: TrainingJob,
        config: Config,
        nodes: Allocation,
        names: Sequence[str],
        folder: Path,
        lease: Lease,
        fit: set[str],
    ):
        super().__init__(config, nodes, names, folder)
        self._job, self._lease, self._fit = job, lease, fit
        # The nodes with ranks, and the last phase that was sent to the other nodes.
        self._trainers = self._names[: trainer_nodes(config)]
        self._told_phase: dict[str, Any] | None = None
        self._is_ending = False
        # Unix time at which the first step began; None before.
        self.first_step_unix: float | None = None
        self._hang_watch = HangWatch(config.launch.hang_timeout_seconds)
        self._preemption_deadline = PreemptionDeadline(config, job.run_folder / "checkpoints")

    def run(self) -> None:
        """Return when all ranks are done.

        Raises:
            AttemptFailedError: A node or process ended early.
            EndedEarlyError: The job's time is over; everything is saved.
            UnfitNodesError: Some nodes are unfit to train.
            CheckpointError: A node rejects a checkpoint; another attempt would not help.
        """
        self.form_group()
        if must_inspect(self._config, self._names) and not self._fit.issuperset(self._names):
            self.inspect(self._job.config_path, self._job.node_local)
            self._fit.update(self._names)
        self._assign_job()
        self._wait_for_all("engines")
        self._train()
        self._wait_for_all("done", self._watch, self._trainers)
        if any(self._members[name].messages["done"]["saved"] for name in self._trainers):
            raise EndedEarlyError("it was asked to end, and saved at the end of its step")

    # ---- the stages ----

    def _assign_job(self) -> None:
        # Read once for all nodes, because nodes may see changes of a shared folder at different times.
        checkpoints = CheckpointFolder(self._job.run_folder / "checkpoints", self._config.trainer.keep_checkpoints)
        self._assign("assign", names=self._names, job=self._job.as_dict(), finished=checkpoints.newest_step())

    def _train(self) -> None:
        urls = {int(i): url for m in self._members.values() for i, url in m.messages["engines"]["urls"].items()}
        content = {
            "engines": [urls[index] for index in sorted(urls)],
            "rendezvous": self._members[self._names[0]].messages["engines"]["rendezvous"],
            "lease": {"folder": str(self._lease.folder), "epoch": self._lease.epoch},
        }
        for member in self._members.values():
            member.channel.send("train", **content)

    def _watch(self) -> None:
        self._end_in_time()
        self._tell_phase()
        self._pass_on_silence()
        told = [m.messages["positions"]["ranks"].items() for m in self._members.values() if m.has_told("positions")]
        positions = {int(rank): Position(**where) for ranks in told for rank, where in ranks if where}
        if positions:
            self._preemption_deadline.observe(max(position.step for position in positions.values()))
        if positions and self.first_step_unix is None:
            self.first_step_unix = time.time() - max(position.seconds for position in positions.values())
        if found := self._hang_watch.observe(positions):
            raise HangError(f"training hangs: {found}; waiting: {self._ask_for_stacks()}")

    def _ask_for_stacks(self) -> str:
        """Return a description of the collective in which each rank waits."""
        asked = [self._members[name] for name in self._trainers]
        for member in asked:
            member.channel.send("stacks")
        deadline = time.monotonic() + STACKS_SECONDS
        while not all(member.has_told("stacks") for member in asked) and time.monotonic() < deadline:
            self._take_messages()
        answers = {m.name: m.messages.get("stacks", {}).get("ranks", {}) for m in self._members.values()}
        stacks = {int(rank): stack for ranks in answers.values() for rank, stack in ranks.items()}
        records = [
            Path(path) for m in self._members.values() for path in m.messages.get("stacks", {}).get("records", [])
        ]
        said = describe_stacks(stacks, {int(rank): name for name, ranks in answers.items() for rank in ranks})
        return f"{said}; {described}" if (described := describe_records(records)) else said

    def _tell_phase(self) -> None:
        """Send rank 0's phase to nodes without ranks when it has changed."""
        ranks = self._members[self._names[0]].messages.get("positions", {}).get("ranks", {})
        position = ranks.get("0")
        phase = position and {"step": position["step"], "phase": position["phase"]}
        if phase == self._told_phase:
            return
        self._told_phase = phase
        for name in self._names[len(self._trainers) :]:
            self._members[name].channel.send("phase", position=phase)

    def _pass_on_silence(self) -> None:
        """Forward the URL of an engine that does not answer rank 0 to all nodes; the engine's node stops it."""
        named = [m.messages.pop("silent") for m in self._members.values() if m.has_told("silent")]
        for message in named:
            for member in self._members.values():
                member.channel.send("silent", url=message["url"])

    def _end_in_time(self) -> None:
        """Request a save at the step's end, once, if a node got SIGTERM or the job's time limit is near."""
        if self._is_ending:
            return
        asked = any(member.has_told("asked_to_end") for member in self._members.values())
        if asked or self._nodes.scheduler.end_is_near(self._preemption_deadline.seconds):
            log.warning(
                "training is asked to save and end: %s", "by a signal" if asked else "the job's time is over soon"
            )
            self._is_ending = True
            self._members[self._names[0]].channel.send("save")

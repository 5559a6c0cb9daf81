"""Ranks that calibrate, over the nodes of a job: all are brought together, and end with it.

A node tells the head where its ranks could meet, then what has ended; the head tells it what they run, and where they
meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.config.load import load_resolved
from posttrain.config.schema import Config
from posttrain.engines.ports import choose_free_ports
from posttrain.launch.channel import POLL_SECONDS
from posttrain.launch.gathering import Gathering
from posttrain.launch.head import Head
from posttrain.launch.node_engines import RENDEZVOUS_OFFSET, report, wait_for_the_end
from posttrain.launch.nodes import Nodes
from posttrain.launch.ranks import Rendezvous, running_ranks

PROGRAM = "posttrain.launch.calibration_rank"


class CalibrationGang(Gathering):
    """A context manager around ranks: all that it starts ends with the block.

    Args:
        config: Of the ranks (`config.derived.calibrating`).
        nodes: Where processes are started.
        names: The nodes, in the order of ranks.
        folder: Gets the logs.
        config_path: That configuration, seen by all nodes.
        command: Arguments of a rank.
    """

    def __init__(
        self,
        config: Config,
        nodes: Nodes,
        names: Sequence[str],
        folder: Path,
        config_path: Path,
        command: Sequence[str],
    ):
        super().__init__(config, nodes, names, folder)
        self._config_path, self._command = config_path, list(command)

    def run(self) -> None:
        """Return when all ranks are done.

        Raises:
            AttemptFailedError: A rank or a node ended, or a node was not heard.
            CheckpointError: A rank refuses what it should read.
        """
        self.gather()
        members = [self._members[name] for name in self._names]
        for rank, member in enumerate(members):
            member.channel.send(
                "calibrate",
                rank=rank,
                addresses=[other.address for other in members],
                config_path=str(self._config_path),
                command=self._command,
                folder=str(self._folder),
                first_port=self._nodes.first_port,
            )
        self._wait_for_all("meeting")
        for member in members:
            member.channel.send("meet", port=members[0].messages["meeting"]["port"])
        self._wait_for_all("done")


def run_ranks(head: Head, assignment: dict[str, Any]) -> NoReturn:
    """Run this node's ranks to their end, and wait until the head says that it is over.

    Raises:
        EndedByHead: It has.
    """
    config = load_resolved(Path(assignment["config_path"]))
    rank, addresses = int(assignment["rank"]), assignment["addresses"]
    first = int(assignment["first_port"])
    head.tell("meeting", port=choose_free_ports(1, addresses[rank], first and first + RENDEZVOUS_OFFSET)[0])
    while (message := head.next_message(POLL_SECONDS)) is None:
        pass
    meeting, folder = Rendezvous(addresses[0], int(message["port"])), Path(assignment["folder"])
    with running_ranks(config, rank, assignment["command"], meeting, folder, "", PROGRAM) as ranks:
        while any(process.process.poll() is None for process in ranks):
            head.next_message(POLL_SECONDS)
            report(head, [ending for process in ranks if (ending := process.ending())])
        # One that has failed since the last look is no success.
        report(head, [ending for process in ranks if (ending := process.ending())])
        head.tell("done", saved=False)
        wait_for_the_end(head)

"""Runs the calibration ranks of one node for the head (`oneshot_job`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from posttrain.cluster.channel import POLL_SECONDS
from posttrain.cluster.head import Head
from posttrain.cluster.node_engines import RENDEZVOUS_OFFSET, report, wait_for_the_end
from posttrain.cluster.ranks import Rendezvous, running_ranks
from posttrain.config.load import load_resolved
from posttrain.rl.engines.ports import choose_free_ports

PROGRAM = "posttrain.cluster.calibration_rank"


def run_ranks(head: Head, assignment: dict[str, Any]) -> NoReturn:
    """Run this node's ranks until they end, then wait for the head to end the attempt.

    Raises:
        EndedByHead: The head ended the attempt.
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
        # A rank may have failed since the last poll.
        report(head, [ending for process in ranks if (ending := process.ending())])
        head.tell("done", saved=False)
        wait_for_the_end(head)

"""A pod of a gang other than the head's: it connects to the head, and starts the head's commands on its node.

It exits with code 0 when the head is gone. The head's own exit code decides whether the JobSet is done, fails or
restarts.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from posttrain.cluster.channel import POLL_SECONDS
from posttrain.cluster.handshake import join
from posttrain.cluster.head import EndedByHead, Head
from posttrain.cluster.jobset import NODE_NAME, NODE_RANK
from posttrain.cluster.nodes import StartedHere, start_here
from posttrain.cluster.rendezvous_file import REMIND_SECONDS, RendezvousFile

log = logging.getLogger(__name__)

# The head starts within seconds of its pod, and shared storage shows its file equally late.
RETRY_SECONDS = 1.0


def lend_this_pod(rendezvous: Path, done: Path | None = None) -> None:
    """Run the head's commands until it disconnects.

    Args:
        rendezvous: File with the head's address.
        done: Exists after training succeeded; the head then needs no pods. None: connect to any head.
    """
    if head := _wait_for_head(rendezvous, done):
        obey(head)
        log.info("the head is gone: its end decides what comes next")


def join_head(rendezvous: RendezvousFile) -> Head:
    """Connect to the head that wrote the file.

    Raises:
        OSError: No process answers, or another one listens there; the head may have ended, and a new one may start.
    """
    head = Head(join(rendezvous.address, rendezvous.secret, os.environ[NODE_RANK], node=os.environ[NODE_NAME]))
    log.info("joined the head at %s", rendezvous.address)
    return head


def obey(head: Head) -> None:
    """Start and end commands for the head until it disconnects; then end the running command."""
    started: StartedHere | None = None
    number = 0
    try:
        while True:
            message = head.next_message(POLL_SECONDS)
            if started and (message or not started.is_running()):
                started.end()
                head.tell("ended", number=number)
                started = None
            if message and message["kind"] == "start":
                started, number = start_here([message["command"]], message["environment"]), message["number"]
    except EndedByHead:
        if started:
            started.end()


def _wait_for_head(rendezvous: Path, done: Path | None) -> Head | None:
    remind_at = time.monotonic()
    while True:
        try:
            return None if done and done.exists() else join_head(RendezvousFile.read(rendezvous))
        except OSError as error:
            if time.monotonic() >= remind_at:
                log.info("waiting for the head of the gang: %s", error)
                remind_at = time.monotonic() + REMIND_SECONDS
            time.sleep(RETRY_SECONDS)

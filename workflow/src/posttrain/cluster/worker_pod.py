"""A pod of a gang that is not its head: it waits for the head, and starts on its node what the head asks for.

It ends with exit code 0 when the head is gone, however that ended: whether the JobSet is done, has failed or starts all
pods again is decided by the head's own end.
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

# The head is there a second or two after its pod; shared storage shows what was just written as late as that.
RETRY_SECONDS = 1.0


def lend_this_pod(rendezvous: Path, done: Path | None = None) -> None:
    """Serve the head's requests until it is gone or needs this pod no more.

    Args:
        rendezvous: Where the head says how to reach it.
        done: Exists when training has ended well; a head that finds it so asks for nobody. None: any head asks.
    """
    if head := _wait_for_head(rendezvous, done):
        obey(head)
        log.info("the head is gone: its end decides what comes next")


def join_head(rendezvous: RendezvousFile) -> Head:
    """Return the head that has written the file.

    Raises:
        OSError: Nobody answers, or the listener did not write the file; the head may have ended, and another may come.
    """
    head = Head(join(rendezvous.address, rendezvous.secret, os.environ[NODE_RANK], node=os.environ[NODE_NAME]))
    log.info("joined the head at %s", rendezvous.address)
    return head


def obey(head: Head) -> None:
    """Start and end commands for the head until it is gone; running commands end then."""
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

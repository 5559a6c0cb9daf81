"""A pod of a gang that is not its head: it waits for the head, and starts on its node what the head asks for.

It ends with exit code 0 when the head is gone, however that ended: whether the JobSet is done, has failed or starts all
pods again is decided by the head's own end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from posttrain.launch.channel import Channel
from posttrain.launch.greeting import join
from posttrain.launch.invitation import REMIND_SECONDS, Invitation
from posttrain.launch.jobset import NODE_NAME, NODE_RANK
from posttrain.launch.nodes import LocalProcess, start_here

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


def lend_this_pod(invitation_path: Path, done: Path) -> None:
    """Do what the head asks for until it is gone, or until it has nothing to ask for.

    Args:
        invitation_path: Where the head says how to reach it.
        done: Exists when training has ended well; a head that finds it so invites nobody.
    """
    if head := _wait_for_head(invitation_path, done):
        head.obey()
        log.info("the head is gone: its end decides what comes next")


def _wait_for_head(invitation_path: Path, done: Path) -> Head | None:
    remind_at = time.monotonic()
    while True:
        try:
            return None if done.exists() else Head.join(Invitation.read(invitation_path))
        except OSError as error:
            if time.monotonic() >= remind_at:
                log.info("waiting for the head of the gang: %s", error)
                remind_at = time.monotonic() + REMIND_SECONDS
            time.sleep(RETRY_SECONDS)


class Head:
    """The head as a waiting pod sees it.

    Args:
        channel: To it.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._process: LocalProcess | None = None

    @staticmethod
    def join(invitation: Invitation) -> Head:
        """Return the head that invites.

        Raises:
            OSError: Nobody answers, or it is not the one who invites; it may have ended, and another may come.
        """
        channel = join(invitation.address, invitation.secret, os.environ[NODE_RANK], node=os.environ[NODE_NAME])
        log.info("joined the head at %s", invitation.address)
        return Head(channel)

    def obey(self) -> None:
        """Follow orders until the head is gone; what it has started ends then."""
        for order in self._channel.messages():
            if order["kind"] in ("start", "end"):
                self._end()
            if order["kind"] == "start":
                self._start(order)
            self._channel.send("here")
        self._end()

    def _start(self, order: dict[str, Any]) -> None:
        self._process = start_here(order["command"], order["environment"])
        threading.Thread(target=self._tell_end, args=(self._process, order["number"]), daemon=True).start()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()

    def _tell_end(self, process: LocalProcess, number: int) -> None:
        process.wait()
        self._channel.send("ended", number=number)

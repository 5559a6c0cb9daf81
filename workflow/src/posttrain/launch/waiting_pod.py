"""A pod of a gang that is not its head: it waits for the head, and starts on its node what the head asks for.

It ends with exit code 0 when the head is gone, however that ended: whether the JobSet is done, has failed or starts all
pods again is decided by the head's own end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.launch.channel import Channel, connect
from posttrain.launch.invitation import GREETING_SECONDS, HEAD, REMIND_SECONDS, Invitation, make_challenge
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
        orders: What it says.
    """

    def __init__(self, channel: Channel, orders: Iterator[dict[str, Any]]):
        self._channel, self._orders = channel, orders
        self._process: LocalProcess | None = None

    @staticmethod
    def join(invitation: Invitation) -> Head:
        """Return the head that invites.

        Raises:
            OSError: Nobody answers, or it is not the one who invites; it may have ended, and another may come.
        """
        rank, challenge = int(os.environ[NODE_RANK]), make_challenge()
        channel = connect(invitation.address)
        channel.set_patience(GREETING_SECONDS)
        orders = channel.messages()
        channel.send("hello", rank=rank, node=os.environ[NODE_NAME], challenge=challenge)
        answer = next(orders, {})
        if not invitation.is_proof(answer.get("proof"), HEAD, challenge):
            channel.close()
            raise ConnectionRefusedError(f"who answers at {invitation.address} has not written the invitation")
        channel.send("pod", proof=invitation.proof(str(rank), str(answer.get("challenge"))))
        if next(orders, {}).get("kind") != "welcome":
            channel.close()
            raise ConnectionRefusedError(f"the head at {invitation.address} does not take this pod")
        channel.set_patience(None)
        log.info("joined the head at %s", invitation.address)
        return Head(channel, orders)

    def obey(self) -> None:
        """Follow orders until the head is gone; what it has started ends then."""
        for order in self._orders:
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

"""A node's or waiting pod's connection to the gang's head."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from posttrain.cluster.channel import Channel
from posttrain.rl.training import graceful_shutdown

# A node counts as silent after 15 missing beats (`launch.node_silence_seconds`: 30). A check for a pod waits for at
# most one beat.
BEAT_SECONDS = 2.0


class EndedByHead(Exception):
    """The head ended the attempt, or is gone."""


class Head:
    """Receives the head's messages, sends ours, and sends regular heartbeats.

    Args:
        channel: Connection to the head.
        when_gone: Called in another thread if the head disconnects without ending the attempt.
    """

    def __init__(self, channel: Channel, when_gone: Callable[[], None] = lambda: None):
        self.tell = channel.send
        self._channel, self._when_gone = channel, when_gone
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        """Return the head's next message, or None after a timeout.

        Raises:
            EndedByHead: The attempt is over.
        """
        try:
            message = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if message["kind"] == "stop":
            raise EndedByHead
        return message

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._messages.put(message)
            if message["kind"] == "stop":
                return
        self._when_gone()
        self._messages.put({"kind": "stop"})

    def _beat(self) -> None:
        while self.tell("asked_to_end" if graceful_shutdown.is_asked() else "beat"):
            time.sleep(BEAT_SECONDS)

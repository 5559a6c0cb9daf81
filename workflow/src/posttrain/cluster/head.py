"""The head of a gang as a node or a waiting pod sees it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from posttrain.cluster.channel import Channel
from posttrain.rl.training import graceful_shutdown

# Fifteen have to be missing before a node counts as silent (`launch.node_silence_seconds`: 30), and who wants to know
# whether a pod is there waits no longer than for the next.
BEAT_SECONDS = 2.0


class EndedByHead(Exception):
    """The head has said that the attempt is over, or is gone itself."""


class Head:
    """A connection to the head: receives its messages, sends ours, and regularly a sign of life.

    Args:
        channel: To the head.
        when_gone: Called in another thread when the head is gone without having said that the attempt is over.
    """

    def __init__(self, channel: Channel, when_gone: Callable[[], None] = lambda: None):
        self.tell = channel.send
        self._channel, self._when_gone = channel, when_gone
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        """Return what it says next, None when nothing comes in time.

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

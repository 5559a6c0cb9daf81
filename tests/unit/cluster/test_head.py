"""The head as a node sees it, over a connection of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from posttrain.cluster import head as head_module
from posttrain.cluster.channel import Channel
from posttrain.cluster.head import EndedByHead, Head

SECONDS = 20.0


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Return the node's end and the head's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = Channel(socket.create_connection(listener.getsockname()), "the head")
        head = Channel(listener.accept()[0], "the node")
    yield node, head
    node.close()
    head.close()


def test_who_is_busy_learns_that_the_head_is_gone(channels: tuple[Channel, Channel]) -> None:
    """A node that reads its copies takes no messages meanwhile."""
    gone = threading.Event()
    node = Head(channels[0], gone.set)
    channels[1].close()
    assert gone.wait(SECONDS)
    with pytest.raises(EndedByHead):
        node.next_message(SECONDS)


def test_a_head_that_says_stop_is_not_gone(channels: tuple[Channel, Channel]) -> None:
    gone = threading.Event()
    node = Head(channels[0], gone.set)
    channels[1].send("save")
    channels[1].send("stop")
    assert node.next_message(SECONDS) == {"kind": "save"}
    with pytest.raises(EndedByHead):
        node.next_message(SECONDS)
    channels[1].close()
    assert not gone.wait(0.2)


def test_it_hears_of_a_node_that_says_nothing(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "BEAT_SECONDS", 0.01)
    Head(channels[0])
    said = channels[1].messages()
    assert [next(said)["kind"] for _ in range(3)] == ["beat"] * 3

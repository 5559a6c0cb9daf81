"""What an own process says over a channel: lines of JSON, and nothing that would end the head with a traceback."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from posttrain.cluster import channel as channel_module
from posttrain.cluster.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        near, _ = listener.accept()
        channel = Channel(near, "node-1")
        yield channel, far
        channel.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"kind": ' + b"[" * 100_000 + b"\n", "JSON that is nested too deeply"),
        (b"no JSON\n", "Expecting value"),
        (b"[1]\n", "no message of ours"),
        (b'{"kind": 1}\n', "no message of ours"),
        (b"x" * 2000, "a message of 1000 bytes or more"),
    ],
)
def test_what_is_no_message_ends_the_channel_with_a_line_in_the_log(
    ends: tuple[Channel, socket.socket],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    why: str,
) -> None:
    channel, far = ends
    if b"x" in said:
        monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    far.sendall(b'{"kind": "first", "text": "\\u00e9"}\n' + said + b'{"kind": "never"}\n')
    with caplog.at_level(logging.WARNING):
        assert list(channel.messages()) == [{"kind": "first", "text": "é"}]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"node-1 is not listened to any more: {why}")


def test_who_goes_in_the_middle_of_a_line_is_gone(
    ends: tuple[Channel, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    channel, far = ends
    far.sendall(b'{"kind": "first"}\n{"kind": "sec')
    far.shutdown(socket.SHUT_WR)
    assert [message["kind"] for message in channel.messages()] == ["first"]
    assert not caplog.records

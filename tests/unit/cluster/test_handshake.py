"""Who may talk to the head of a gang, over real sockets: all others cost little, are told nothing and are sent away."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import queue
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from posttrain.cluster import handshake
from posttrain.cluster.channel import Channel
from posttrain.cluster.handshake import Reception, join

SECRET = "of the gang"
SECONDS = 20.0


class Head:
    """A reception with what it let in."""

    def __init__(self) -> None:
        self.guests: queue.Queue[tuple[dict[str, Any], Channel]] = queue.Queue()
        awaited = {"node-1", "node-2"}
        self.reception = Reception("127.0.0.1", SECRET, awaited.__contains__, lambda *guest: self.guests.put(guest))

    def connect(self) -> socket.socket:
        """Return a stranger's connection."""
        host, _, port = self.reception.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=SECONDS)

    def still_serves(self) -> bool:
        """Tell whether one who belongs to the gang comes in."""
        join(self.reception.address, SECRET, "node-2").close()
        return self.guests.get(timeout=SECONDS)[0]["who"] == "node-2"


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.reception.close()


@pytest.fixture
def stranger(head: Head) -> Iterator[socket.socket]:
    with head.connect() as connection:
        yield connection


def proof(side: str, hello: dict[str, Any], challenge: str, secret: str = SECRET) -> str:
    """What the protocol says, in words of hashlib's."""
    said = json.dumps([side, hello, challenge], sort_keys=True).encode()
    return hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()


def say(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def hear(connection: socket.socket) -> dict[str, Any] | None:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            return None
        line += byte
    return dict(json.loads(line))


def is_sent_away(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it had not read all that was said
        return True


HELLO = {"kind": "hello", "who": "node-1", "challenge": "c" * 32, "address": "127.0.0.1"}


def test_both_sides_prove_the_secret_and_neither_sends_it(head: Head, stranger: socket.socket) -> None:
    say(stranger, **HELLO)
    answer = hear(stranger)
    assert answer is not None
    assert answer["proof"] == proof("listens", HELLO, answer["challenge"])
    assert re.fullmatch("[0-9a-f]{32}", answer["challenge"])
    say(stranger, kind="proof", proof=proof("connects", HELLO, answer["challenge"]))
    assert hear(stranger) == {"kind": "welcome"}
    hello, _ = head.guests.get(timeout=SECONDS)
    assert hello == HELLO


def test_what_a_guest_says_of_itself_arrives(head: Head) -> None:
    channel = join(head.reception.address, SECRET, "node-1", node="somewhere")
    hello, to_guest = head.guests.get(timeout=SECONDS)
    assert (hello["who"], hello["node"], hello["address"]) == ("node-1", "somewhere", "127.0.0.1")
    to_guest.send("order", number=1)
    assert next(channel.messages()) == {"kind": "order", "number": 1}


WRONG = {
    "another secret": lambda challenge: proof("connects", HELLO, challenge, "guessed"),
    "the head's own proof": lambda challenge: proof("listens", HELLO, challenge),
    "of another name": lambda challenge: proof("connects", HELLO | {"who": "node-2"}, challenge),
    "of another challenge": lambda challenge: proof("connects", HELLO, challenge[::-1]),
    "nothing": lambda challenge: None,
    "no text": lambda challenge: 0,
    "no Unicode": lambda challenge: "\ud800",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_proof_is_sent_away(head: Head, stranger: socket.socket, wrong: str) -> None:
    say(stranger, **HELLO)
    answer = hear(stranger)
    assert answer is not None
    say(stranger, kind="proof", proof=WRONG[wrong](answer["challenge"]))
    assert is_sent_away(stranger)
    assert head.guests.empty()
    assert head.still_serves()


def test_a_proof_that_was_heard_is_worth_nothing_the_next_time(head: Head, stranger: socket.socket) -> None:
    """Everything that one has said is said again, over a connection of its own."""
    said = [HELLO]
    say(stranger, **HELLO)
    answer = hear(stranger)
    assert answer is not None
    said.append({"kind": "proof", "proof": proof("connects", HELLO, answer["challenge"])})
    say(stranger, **said[1])
    assert hear(stranger) == {"kind": "welcome"}
    head.guests.get(timeout=SECONDS)
    with head.connect() as replay:
        for message in said:
            say(replay, **message)
        assert hear(replay) is not None, "the head's answer, with another challenge"
        assert is_sent_away(replay)
    assert head.guests.empty()


def test_a_head_cannot_be_made_to_answer_its_own_question(head: Head, stranger: socket.socket) -> None:
    """Its challenge, asked back over a second connection, gives a proof of the other side."""
    say(stranger, **HELLO)
    answer = hear(stranger)
    assert answer is not None
    with head.connect() as mirror:
        say(mirror, **HELLO | {"challenge": answer["challenge"]})
        reflected = hear(mirror)
    assert reflected is not None
    say(stranger, kind="proof", proof=reflected["proof"])
    assert is_sent_away(stranger)


SAID = {
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"[1]\n",
    "no kind": b'{"who": "node-1"}\n',
    "no name": b'{"kind": "hello", "who": ["node-1"], "challenge": "c"}\n',
    "no Unicode": b"\xff\xfe\n",
    "nested": b'{"kind":' + b"[" * 4000 + b"\n",
    "too long": b" " * 5000,
    "half a line": b'{"kind": "hello"',
    "nothing": b"",
}


@pytest.mark.parametrize("said", SAID)
def test_what_is_no_greeting_is_told_in_a_line(
    head: Head, stranger: socket.socket, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        stranger.sendall(SAID[said])
        if said in ("half a line", "nothing"):
            stranger.shutdown(socket.SHUT_WR)
        assert is_sent_away(stranger)
        assert head.still_serves()
    (record,) = caplog.records
    assert record.getMessage().startswith("a connection from 127.0.0.1 was refused, as later ones from there will be: ")
    assert "\n" not in record.getMessage()
    assert record.exc_info is None


def test_a_host_that_knocks_again_and_again_is_named_once(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with head.connect() as connection:
                connection.sendall(b"knock\n")
                assert is_sent_away(connection)
    assert len(caplog.records) == 1


def test_no_more_than_a_few_hosts_are_named(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = head.reception.address.rpartition(":")
    with caplog.at_level(logging.WARNING):
        for last in range(1, 30):
            address = (host, int(port))
            with socket.create_connection(address, SECONDS, source_address=(f"127.0.1.{last}", 0)) as connection:
                connection.sendall(b"knock\n")
                assert is_sent_away(connection)
    assert len(caplog.records) == handshake.MAX_NAMED


def test_who_says_half_a_line_is_not_waited_for(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor who says a byte now and then: the whole greeting has one deadline."""
    monkeypatch.setattr(handshake, "GREETING_SECONDS", 1.0)
    with head.connect() as slow:
        started, sent, answer = time.monotonic(), 0, None
        slow.settimeout(0.05)
        while answer is None:
            assert time.monotonic() < started + SECONDS, "it is still listened to"
            with contextlib.suppress(TimeoutError):
                try:
                    slow.sendall(b" ")
                    sent += 1
                    answer = slow.recv(1)
                except ConnectionError:
                    answer = b""
    assert answer == b""
    assert sent > 1


def test_a_stranger_s_hundred_megabytes_are_not_taken(head: Head, stranger: socket.socket) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConnectionError):
        stranger.sendall(bytes(100 << 20))
    assert psutil.Process().memory_info().rss - before < 10 << 20
    assert head.still_serves()


def test_strangers_who_only_wait_keep_nobody_out(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_STRANGERS", 8)
    waiting = [head.connect() for _ in range(40)]
    try:
        assert head.still_serves()
        assert is_sent_away(waiting[0]), "who has come first"
        assert sum(thread.name.endswith("(_greet)") for thread in threading.enumerate()) <= 10
    finally:
        for connection in waiting:
            connection.close()


def test_a_process_without_file_descriptors_lets_in_when_it_has_some(
    head: Head, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "ACCEPT_AGAIN_SECONDS", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as late, caplog.at_level(logging.WARNING):
        # All numbers below this one are taken.
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        try:
            host, _, port = head.reception.address.rpartition(":")
            late.connect((host, int(port)))
            deadline = time.monotonic() + 30
            while "Too many open files" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "a connection from somebody was refused" in caplog.text
    assert "Too many open files" in caplog.text
    assert head.still_serves()


# ---- a false head ----


@pytest.fixture
def false_head() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def answer_with(listener: socket.socket, content: bytes) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(content)
            with contextlib.suppress(ConnectionResetError):  # it has not read everything
                connection.recv(4096)

    threading.Thread(target=answer, daemon=True).start()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"kind": "head", "challenge": "c", "proof": "0"}\n', "it does not know the secret"),
        (b'{"kind": "head"}\n', "it does not know the secret"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Expecting value"),
        (b'{"kind":' + b"[" * 4000 + b"\n", "JSON that is nested too deeply"),
        (b"x" * 5000, "it says more than a greeting"),
    ],
)
def test_a_head_that_proves_nothing_is_not_told_anything(false_head: socket.socket, content: bytes, why: str) -> None:
    answer_with(false_head, content)
    address = f"127.0.0.1:{false_head.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"{address} is not the head, or does not take node-1: {why}"):
        join(address, SECRET, "node-1")


def test_a_head_that_says_nothing_is_not_waited_for(false_head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREETING_SECONDS", 0.2)
    with pytest.raises(ConnectionError, match="timed out"):
        join(f"127.0.0.1:{false_head.getsockname()[1]}", SECRET, "node-1")


def test_who_is_not_waited_for_is_told_so(head: Head) -> None:
    with pytest.raises(ConnectionError, match="does not take node-9"):
        join(head.reception.address, SECRET, "node-9")

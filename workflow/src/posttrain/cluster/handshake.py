"""Mutual authentication of two processes of a gang.

Both have the secret, which is never sent. The connecting process sends its name and a random challenge, and the
listening process sends its challenge. Each then sends an HMAC of the whole exchange. A proof is valid for one role in
one connection, so it cannot be replayed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from posttrain.cluster.channel import Channel, as_line, from_line

log = logging.getLogger(__name__)

# Environment variable of processes that the head starts.
SECRET_VARIABLE = "POSTTRAIN_GANG_SECRET"
# A head with a full backlog accepts once it is scheduled again; a host that is gone never answers.
CONNECT_SECONDS = 30.0
# Seconds after which an unauthenticated peer is disconnected.
GREETING_SECONDS = 30.0
# A name, an address, a challenge and a proof take 300 bytes.
MAX_GREETING_BYTES = 4096
# Unauthenticated connections at a time, one thread each: all nodes of the largest gang may connect at once. A further
# connection closes the oldest.
MAX_STRANGERS = 256
# Limits the hosts in the log, because any number may connect.
MAX_NAMED = 10
# Without free file descriptors, an immediate retry would only fill the log.
ACCEPT_AGAIN_SECONDS = 1.0
LISTENS, CONNECTS = "listens", "connects"


class HandshakeError(ConnectionError):
    """The peer does not belong to this gang."""


class Reception:
    """Listens on one address and admits peers that prove the secret.

    Args:
        host: Address to listen on.
        secret: The gang's secret.
        is_awaited: Returns whether a peer of this name may join.
        receive: Called for each peer in its own thread, with the peer's hello message and its channel.
    """

    def __init__(
        self,
        host: str,
        secret: str,
        is_awaited: Callable[[str], bool],
        receive: Callable[[dict[str, Any], Channel], None],
    ):
        self._secret, self._is_awaited, self._receive = secret, is_awaited, receive
        self._strangers: deque[socket.socket] = deque()
        self._named: set[str] = set()
        self._is_open = True
        self._listener = socket.create_server((host, 0), backlog=MAX_STRANGERS)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop admitting peers."""
        self._is_open = False
        self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits in accept()
        self._listener.close()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as error:
                if self._is_open:  # for example, no free file descriptor
                    self._name("somebody", error)
                    time.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            self._strangers.append(connection)
            if len(self._strangers) > MAX_STRANGERS:
                with contextlib.suppress(OSError, IndexError):
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection, str(host)), daemon=True).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        """Authenticate one connection, or close it."""
        try:
            hello = self._hear(connection)
            channel = Channel(connection, hello["who"])
        # JSON at the parser's depth limit may be too deep to serialize again.
        except (OSError, ValueError, RecursionError) as error:
            self._name(host, error)
            connection.close()
            return
        finally:
            with contextlib.suppress(ValueError):
                self._strangers.remove(connection)
        channel.send("welcome")  # before any other message
        self._receive(hello, channel)

    def _hear(self, connection: socket.socket) -> dict[str, Any]:
        """Return the hello message of an authenticated peer."""
        deadline, challenge = time.monotonic() + GREETING_SECONDS, _challenge()
        hello = _read(connection, deadline)
        if not isinstance(hello.get("who"), str):
            raise HandshakeError("it does not say who it is")
        said = (self._secret, hello, challenge)
        connection.sendall(as_line({"kind": "head", "challenge": challenge, "proof": _proof(LISTENS, *said)}))
        _check(_read(connection, deadline), CONNECTS, *said)
        if not self._is_awaited(hello["who"]):
            raise HandshakeError(f"nobody waits for {hello['who']}")
        connection.settimeout(None)
        return hello

    def _name(self, host: str, why: Exception) -> None:
        if len(self._named) < MAX_NAMED and host not in self._named:
            self._named.add(host)
            log.warning("a connection from %s was refused, as later ones from there will be: %s", host, why)


def join(address: str, secret: str, who: str, **about: Any) -> Channel:
    """Return a channel to the head at "host:port".

    Args:
        address: Address of the head.
        secret: The gang's secret.
        who: Name of this process.
        about: Further fields of the hello message; JSON types.

    Raises:
        OSError: The peer does not answer, does not know the secret, or does not expect this process.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    try:
        _greet_head(connection, secret, {"kind": "hello", "who": who, "challenge": _challenge(), **about})
    except (OSError, ValueError) as error:
        connection.close()
        raise HandshakeError(f"who listens at {address} is not the head, or does not take {who}: {error}") from error
    connection.settimeout(None)
    return Channel(connection, f"the head at {address}")


def _greet_head(connection: socket.socket, secret: str, hello: dict[str, Any]) -> None:
    deadline = time.monotonic() + GREETING_SECONDS
    hello["address"] = connection.getsockname()[0]
    connection.sendall(as_line(hello))
    answer = _read(connection, deadline)
    said = (secret, hello, answer.get("challenge"))
    _check(answer, LISTENS, *said)
    connection.sendall(as_line({"kind": "proof", "proof": _proof(CONNECTS, *said)}))
    _read(connection, deadline)


def _challenge() -> str:
    """Return a new random challenge."""
    return secrets.token_hex(16)


def _proof(side: str, secret: str, hello: dict[str, Any], challenge: object) -> str:
    said = json.dumps([side, hello, challenge], sort_keys=True)
    return hmac.digest(secret.encode(), said.encode(), "sha256").hex()


def _check(answer: dict[str, Any], side: str, secret: str, hello: dict[str, Any], challenge: object) -> None:
    if not hmac.compare_digest(str(answer.get("proof")).encode(), _proof(side, secret, hello, challenge).encode()):
        raise HandshakeError("it does not know the secret")


def _read(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Read one message from an unauthenticated peer, and no byte after it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) == MAX_GREETING_BYTES:
            raise HandshakeError("it says more than a greeting")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (byte := connection.recv(1)):
            raise HandshakeError("it has said nothing" if not line else "it has gone in the middle of a greeting")
        line += byte
    return from_line(bytes(line))

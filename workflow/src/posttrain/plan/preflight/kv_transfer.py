"""One process per node that writes a block of host memory to the next node's, with the KV caches' transport.

It runs in the engines' environment, which has the transport but maybe not this package: it is started by its path and
imports none of our modules. Every node writes to the next one in a ring, once to connect, then several times for the
rate; the receiver verifies the content. A result is a line of JSON on stdout.

Mooncake silently falls back from RDMA to TCP if a node's cards are not usable, and NIXL's UCX uses any available
transport: the only symptom is a lower rate than on other nodes.

Both ends of a connection authenticate with the secret in the environment; the transports have no authentication.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import faulthandler
import importlib
import json
import os
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

# Modules to import for each backend; torch first, as in an engine, because both link to its CUDA runtime.
MODULES = {"mooncake": ("torch", "mooncake.engine"), "nixl": ("torch", "nixl._api")}
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MOONCAKE_PROTOCOLS = {"cpu": "tcp", "cuda": "rdma"}
# The best of these repeats is reported, because others may use the network at the same time.
NUM_REPEATS = 5
SECRET_VARIABLE = "POSTTRAIN_GANG_SECRET"
# Messages between two processes are far shorter.
MAX_MESSAGE_BYTES = 1 << 20
# If the next node does not listen or a write does not return, this process exits and prints its stack to the log.
LIMIT_SECONDS = 40.0
RETRY_SECONDS = 0.1


class Block:
    """Host memory at a fixed address.

    Args:
        content: Initial content.
    """

    def __init__(self, content: bytes):
        self.content = bytearray(content)
        self.size_bytes = len(content)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.content))


class Transport(Protocol):
    """Writes to the memory of another process."""

    offer: Any
    """The data that another process needs to write into this one's block, as plain types."""

    def write(self, offer: Any) -> None:
        """Write this process's block into another process's, and return after completion.

        Raises:
            RuntimeError: The write fails.
        """


class Mooncake:
    """Mooncake's transfer engine, with addresses exchanged between the two processes.

    Args:
        place: Index of this node in the ring.
        host: Address at which others reach it.
        device: "cuda" with RDMA cards.
        outgoing: Block to send.
        incoming: Block that others write to.
    """

    def __init__(self, place: int, host: str, device: str, outgoing: Block, incoming: Block):
        from mooncake.engine import TransferEngine

        self._engine, self._outgoing = TransferEngine(), outgoing
        _succeed("initialize", self._engine.initialize(host, "P2PHANDSHAKE", MOONCAKE_PROTOCOLS[device], ""))
        for block in (outgoing, incoming):
            _succeed("register_memory", self._engine.register_memory(block.address, block.size_bytes))
        self.offer = {"session": f"{host}:{self._engine.get_rpc_port()}", "address": incoming.address}

    def write(self, offer: Any) -> None:
        """Write the block."""
        here, size = self._outgoing.address, self._outgoing.size_bytes
        _succeed("write", self._engine.transfer_sync_write(offer["session"], here, offer["address"], size))


class Nixl:
    """A NIXL agent with UCX; for the arguments see `Mooncake`."""

    def __init__(self, place: int, host: str, device: str, outgoing: Block, incoming: Block):
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent, self._outgoing = nixl_agent(f"node {place}", nixl_agent_config(backends=["UCX"])), outgoing
        blocks = [(block.address, block.size_bytes, 0, "") for block in (outgoing, incoming)]
        self._registered = self._agent.register_memory(blocks, "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.offer = {"metadata": metadata, "address": incoming.address}

    def write(self, offer: Any) -> None:
        """Write the block."""
        peer = self._agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        ends = [
            self._agent.get_xfer_descs([(address, self._outgoing.size_bytes, 0)], "DRAM")
            for address in (self._outgoing.address, offer["address"])
        ]
        transfer = self._agent.initialize_xfer("WRITE", *ends, peer)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL's write ended as {state}")


def _succeed(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"Mooncake's {what} returned {code}")


TRANSPORTS: dict[str, type[Mooncake] | type[Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}


def main() -> None:
    """Send to the next node, receive from the previous one, and print the rate (MB/s) and whether all bytes arrived."""
    arguments = parse_arguments()
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    places, place, size = arguments.places, arguments.place, BLOCK_BYTES[arguments.device]
    host, port = places[place]
    outgoing, incoming = Block(pattern(place, size)), Block(bytes(size))
    for name in MODULES[arguments.backend]:
        importlib.import_module(name)
    transport = TRANSPORTS[arguments.backend](place, host, arguments.device, outgoing, incoming)
    secret = os.environ.pop(SECRET_VARIABLE).encode()
    with Listener((host, port), authkey=secret) as listener:
        expected = pattern((place - 1) % len(places), size)
        receiver = threading.Thread(target=receive, args=(listener, transport, incoming, expected), daemon=True)
        receiver.start()
        next_host, next_port = places[(place + 1) % len(places)]
        with connect(next_host, next_port, secret) as connection:
            rate, has_arrived = send(connection, transport, size)
            print(json.dumps({"rate": rate, "has_arrived": has_arrived}), flush=True)
        receiver.join()


def pattern(place: int, size_bytes: int) -> bytes:
    """Return the bytes that a node sends: they differ between nodes and between positions in the block."""
    words = (bytes([place % 251]) + number.to_bytes(7, "little") for number in range(4096))
    unit = b"".join(words)
    return unit * (size_bytes // len(unit))


def receive(listener: Listener, transport: Transport, incoming: Block, expected: bytes) -> None:
    """Let the previous node write, and send it the result of the comparison."""
    with accept(listener) as connection:
        say(connection, transport.offer)
        hear(connection)
        say(connection, incoming.content == expected)


def accept(listener: Listener) -> Connection:
    """Return the first authenticated connection; all others are rejected."""
    while True:
        try:
            return listener.accept()
        except (AuthenticationError, OSError, EOFError):
            continue


def send(connection: Connection, transport: Transport, size_bytes: int) -> tuple[float, bool]:
    """Write to the next node; return MB/s, the best of several writes, and whether all bytes arrived."""
    offer = hear(connection)
    transport.write(offer)
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        transport.write(offer)
        seconds.append(time.perf_counter() - started)
    say(connection, "written")
    return size_bytes / 1e6 / min(seconds), bool(hear(connection))


def connect(host: str, port: int, secret: bytes) -> Connection:
    """Connect to another node's process; retries until it listens."""
    while True:
        try:
            return Client((host, port), authkey=secret)
        except ConnectionRefusedError:
            time.sleep(RETRY_SECONDS)


def say(connection: Connection, content: Any) -> None:
    """Send plain types as JSON, because a network listener must not unpickle."""
    connection.send_bytes(json.dumps(content).encode())


def hear(connection: Connection) -> Any:
    """Return the peer's message."""
    return json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line from the node's supervisor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=sorted(TRANSPORTS), required=True)
    parser.add_argument("--device", choices=sorted(BLOCK_BYTES), required=True)
    parser.add_argument("--places", type=json.loads, required=True, help="[host, port] of each node, as JSON")
    parser.add_argument("--place", type=int, required=True, help="this node's number in that list")
    return parser.parse_args()


if __name__ == "__main__":
    main()

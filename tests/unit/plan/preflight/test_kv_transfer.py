"""Host memory moved between processes by NIXL, in the engines' environment; Mooncake needs a library of RDMA cards."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener

import pytest
from tests.support.network_nodes import limited_hosts, require_network
from tests.support.sglang_environment import PYTHON, require_sglang

from posttrain.plan.preflight import kv_transfer
from posttrain.plan.preflight.judgement import Rows, judge_transfers
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports

MEGABITS, FEW_MEGABITS = 800, 80
NAMES = ("a", "b", "c", "d")

Start = Callable[..., subprocess.Popen]


def move(places: Sequence[tuple[str, int]], starts: Sequence[Start], **variables: str) -> dict[str, Rows]:
    """Run all processes of a ring and return what each printed, by name."""
    command = [PYTHON, "-P", kv_transfer.__file__, "--backend", "nixl", "--device", "cpu"]
    processes = [
        start(
            *(*command, "--places", json.dumps(places), "--place", str(place)),
            env={**os.environ, "POSTTRAIN_GANG_SECRET": "of the gang", **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place, start in enumerate(starts)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    rows = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    return dict(zip(NAMES, rows, strict=False))


def start_here(*command: object, **options) -> subprocess.Popen:
    return subprocess.Popen([*map(str, command)], **options)


def test_every_node_sends_to_the_next_one() -> None:
    require_sglang()
    places = [(LOOPBACK, port) for port in choose_free_ports(3)]
    sent = move(places, [start_here] * 3)
    assert [len(rows) for rows in sent.values()] == [1, 1, 1]
    assert all(row["has_arrived"] is True and row["rate"] > 10 for (row,) in sent.values())


def test_only_who_knows_the_secret_is_listened_to() -> None:
    """Strangers come first, say too much, nothing or the wrong thing; then comes the node before."""
    with Listener((LOOPBACK, 0), authkey=b"of the gang") as listener:
        host, port = listener.address
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(kv_transfer.accept, listener)
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000):
                with contextlib.suppress(ConnectionError), socket.create_connection((host, port)) as stranger:
                    stranger.sendall(said)
            with pytest.raises(AuthenticationError):
                kv_transfer.connect(host, port, b"guessed")
            with kv_transfer.connect(host, port, b"of the gang") as ours, accepted.result(10) as theirs:
                kv_transfer.say(ours, {"plain": [1]})
                assert kv_transfer.hear(theirs) == {"plain": [1]}
                ours.send_bytes(bytes(kv_transfer.MAX_MESSAGE_BYTES + 1))
                with pytest.raises(OSError, match="bad message length"):
                    kv_transfer.hear(theirs)


def test_a_node_with_a_slow_network_is_named() -> None:
    require_sglang()
    require_network()
    with limited_hosts(len(NAMES), MEGABITS) as hosts:
        limit = ("tbf", "rate", f"{FEW_MEGABITS}mbit", "burst", "64k", "latency", "25ms")
        bridge, _, slow = hosts[2].name.rpartition("-")
        for namespace, device in ((hosts[2].name, "eth0"), (bridge, f"port{slow}")):
            replace = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)
            subprocess.run(replace, check=True)
        ports = choose_free_ports(len(NAMES))
        places = [(host.address, port) for host, port in zip(hosts, ports, strict=True)]
        # All are one machine: else memory is shared, and nothing goes over a network.
        sent = move(places, [host.start for host in hosts], UCX_TLS="tcp", UCX_NET_DEVICES="eth0")
    rates = {name: row["rate"] for name, (row,) in sent.items()}
    assert max(rates["b"], rates["c"]) < FEW_MEGABITS / 8 < min(rates["a"], rates["d"])
    unfit = judge_transfers(sent, "nixl", 0.25)
    assert list(unfit) == ["c"]
    assert unfit["c"][0].startswith("KV cache over nixl from b to c: ")


@pytest.mark.parametrize("place", [0, 1, 250])
def test_what_is_sent_tells_its_sender_and_its_place(place: int) -> None:
    block = kv_transfer.pattern(place, 1 << 16)
    assert len(block) == 1 << 16
    assert block != kv_transfer.pattern(place + 1, 1 << 16)
    assert block[8:16] != block[:8]


def test_it_needs_nothing_of_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({kv_transfer.__file__!r}); assert 'posttrain' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-S", "-c", code], env={}, check=True, timeout=60)

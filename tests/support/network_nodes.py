"""Nodes on one machine, each with a network of its own: namespaces on a bridge, every link limited in both directions.

Shared storage is a host of the same kind, whose folder each node mounts over SFTP. All of it is Linux's
and Debian's own: `make env-network` installs iproute2, sshfs, socat and openssh-sftp-server. It needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import require

SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
SFTP_PORT = 2022
NETWORK = "10.79.0"
# Attributes may be a second old: less than on NFS.
CACHE = "attr_timeout=1,entry_timeout=0,negative_timeout=0,dcache_timeout=1,dcache_stat_timeout=1,dcache_dir_timeout=1"


@dataclass(frozen=True)
class Host:
    """A network namespace with one link, `eth0`.

    Args:
        name: Of the namespace.
        address: On the bridge's network.
    """

    name: str
    address: str

    def start(self, *command: object, **options) -> subprocess.Popen:
        """Start a program that sees this host's network."""
        return subprocess.Popen([*_inside(self.name), *map(str, command)], **options)

    def sent_bytes(self) -> int:
        """Return how much has left over the link, headers included."""
        shown = _run("ip", "-n", self.name, "-s", "-j", "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def missing_network() -> str:
    """Return why hosts cannot be made here; empty where they can."""
    programs = [name for name in ("ip", "tc", "nsenter", "sshfs", "socat", "fusermount3") if not shutil.which(name)]
    reason = f"missing {programs}: make env-network" if programs or not SFTP_SERVER.exists() else ""
    return reason or ("" if os.geteuid() == 0 else "network namespaces need root")


def require_network() -> None:
    """Skip the test where hosts cannot be made; fail it where REQUIRE asks for them."""
    require("network", missing_network())


@contextmanager
def limited_hosts(count: int, megabits: int) -> Iterator[list[Host]]:
    """Make hosts whose links carry so many megabits per second each way; they go with the block."""
    bridge = f"pt{os.getpid()}"
    with ExitStack() as stack:
        _add(stack, bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        yield [_add_host(stack, bridge, index, megabits) for index in range(count)]


@contextmanager
def mounted(storage: Host, folder: Path, nodes: Sequence[Host], below: Path) -> Iterator[list[Path]]:
    """Let `storage` serve `folder`, mount it on each node, and return where each sees it."""
    with ExitStack() as stack:
        listen = f"TCP-LISTEN:{SFTP_PORT},reuseaddr,fork"
        server = storage.start("socat", listen, f"EXEC:{SFTP_SERVER}")
        stack.callback(_end, server)
        time.sleep(0.5)
        places = []
        for node in nodes:
            place = below / f"shared-of-{node.name}"
            place.mkdir(parents=True)
            options = f"directport={SFTP_PORT},{CACHE}"
            _run(*_inside(node.name), "sshfs", "-o", options, f"{storage.address}:{folder}", str(place))
            stack.callback(_run, "fusermount3", "-u", "-z", str(place))
            places.append(place)
        yield places


def _add_host(stack: ExitStack, bridge: str, index: int, megabits: int) -> Host:
    host, port = Host(f"{bridge}-{index}", f"{NETWORK}.{index + 1}"), f"port{index}"
    _add(stack, host.name)
    peer = ("peer", "name", "eth0", "netns", host.name)
    _run("ip", "-n", bridge, "link", "add", port, "type", "veth", *peer)
    _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for namespace, device in ((bridge, port), (host.name, "eth0")):
        _run("ip", "-n", namespace, "link", "set", device, "up")
        limit = ("tbf", "rate", f"{megabits}mbit", "burst", "256k", "latency", "25ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)
    return host


def _add(stack: ExitStack, namespace: str) -> None:
    _run("ip", "netns", "add", namespace)
    stack.callback(_run, "ip", "netns", "delete", namespace)
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _inside(namespace: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}"]


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout

"""What the processes of a workflow listen on while they run, and what another user of the machine hears there.

Each socket is tried as `nobody` soon after it is seen. What may be heard where stands in `KNOWN`, and with its reason
in docs/threat-model.md; every other socket fails the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from tests.support.interruptions import processes_of
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT, WorkflowFolder

LOOK_SECONDS, TRY_SECONDS = 0.1, 1.0
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
LISTENS = {"tcp": "0A", "udp": "07"}
UNIX_LISTENS = 0x10000
# It imports what it needs before it becomes nobody, who may read little. A stranger's words are HTTP, with the end of a
# line: every server of ours has something to say to that.
PROBE = """
import json, os, socket, sys, time
places, words = json.load(sys.stdin), b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
os.setgroups([])
os.setresgid(nobody := int(sys.argv[1]), nobody, nobody)
os.setresuid(nobody, nobody, nobody)

def say(kind, address, port):
    stranger = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    try:
        stranger.settimeout(5.0)
        stranger.connect(address if kind == "unix" else (address, port))
        stranger.sendall(words)
    except OSError as error:
        return type(error).__name__
    return stranger

def hear(stranger, deadline):
    if isinstance(stranger, str):
        return stranger
    try:
        stranger.settimeout(max(0.001, deadline - time.monotonic()))
        return stranger.recv(200).decode("latin-1") or "closed"
    except TimeoutError:
        return "nothing"
    except OSError as error:
        return type(error).__name__

strangers = [say(*place) for place in places]
deadline = time.monotonic() + 1.0
print(json.dumps([hear(stranger, deadline) for stranger in strangers]))
"""


@dataclass(frozen=True)
class Listener:
    """A socket that others can send to.

    Args:
        program: What its process runs: a module, a script, a program's name.
        kind: "tcp", "udp" or "unix".
        address: An IP address; of a UNIX socket its path, or a name behind a NUL byte.
        port: Of TCP and UDP.
        network: The network namespace.
        pid: Of its process.
        heard: By another user: the first words, "closed", "nothing", or the name of an error.
    """

    program: str
    kind: str
    address: str
    port: int
    network: str
    pid: int
    heard: str = ""

    def __str__(self) -> str:
        return f"{self.program}: {self.kind} {self.address}:{self.port}, which told another user {self.heard!r}"


@dataclass(frozen=True)
class Known:
    """Sockets that other users may reach; docs/threat-model.md says why, or how they are refused.

    Args:
        program: A regular expression.
        kind: Another.
        heard: A regular expression of what may be heard there.
    """

    program: str
    kind: str
    heard: str

    def covers(self, found: Listener) -> bool:
        """Tell whether a socket is one of these."""
        said = re.fullmatch(self.heard, found.heard, re.DOTALL)
        return bool(re.fullmatch(self.kind, found.kind) and re.fullmatch(self.program, found.program) and said)


RANK = "posttrain.cluster.trainer_rank"
CLOSED = "closed|ConnectionResetError|ConnectionRefusedError|BrokenPipeError"
# By their names in the docs.
KNOWN = {
    # Asked while it loads or ends it says nothing.
    "engine": Known(
        r"posttrain\.rl\.engines\.embedded|sglang_server\.py", "tcp", rf"HTTP/1\.1 401 .*|nothing|{CLOSED}"
    ),
    "head of a job": Known(r"train\.py", "tcp", CLOSED),
    "gloo": Known(rf"{re.escape(RANK)}|sglang::scheduler", "tcp", f"nothing|{CLOSED}"),
    "meeting of ranks": Known(re.escape(RANK), "tcp", "nothing"),
    # Who prefills and who decodes meet over HTTP, and ZeroMQ greets whoever comes.
    "KV caches": Known(r"sglang_server\.py|sglang::scheduler", "tcp", r"HTTP/1\.1 (200|404) .*|\xff.*"),
    "BitTorrent": Known(r"stage_to_node_local\.py|posttrain\.cluster\.node", "tcp|udp", CLOSED),
    "preflight": Known(r"posttrain\.plan\.preflight\.links|posttrain\.cluster\.node", "tcp", f"nothing|{CLOSED}"),
    "srun": Known("srun", "tcp", f"nothing|{CLOSED}"),
    "UNIX sockets": Known(".*", "unix", "PermissionError"),
}


@contextmanager
def watched_sockets(workflow: WorkflowFolder) -> Iterator[list[Listener]]:
    """Find and try whatever a workflow listens on while the block runs; the list is complete behind it.

    A socket is tried again as long as what is heard there is not known, and an engine's until it answers. Looking does
    not wait for trying: a rank that is killed soon after its last socket opened has all of them on the list, and what
    was closed before its turn counts as closed.
    """
    found: dict[Listener, Listener] = {}
    ends, tried = threading.Event(), []

    def look() -> None:
        while not ends.wait(LOOK_SECONDS):
            for at in listeners_of(processes_of(workflow)):
                if at.kind != "unix":  # of these only a try tells who may speak there
                    found.setdefault(at, replace(at, heard="closed"))

    def hear() -> None:
        settled = set()
        while not ends.wait(TRY_SECONDS):
            unknown = [at for at in listeners_of(processes_of(workflow)) if at not in settled]
            heard = _heard_by_nobody(unknown) if IS_ROOT else [at.heard for at in unknown]
            found.update((at, replace(at, heard=words)) for at, words in zip(unknown, heard, strict=True))
            settled |= {at for at in unknown if _is_settled(found[at])}

    with ThreadPoolExecutor(2) as pool:
        watching = [pool.submit(work) for work in (look, hear)]
        try:
            yield tried
        finally:
            ends.set()
        for thread in watching:
            thread.result()
    tried.extend(found.values())


def assert_all_known(found: Sequence[Listener], num_silent: int, addresses: str = r"127\.0\.0\.1") -> None:
    """Fail for a socket that is on no list, or at an address that nobody needs.

    Args:
        found: See `watched_sockets`.
        num_silent: Of the trainer ranks together: gloo's sockets, one for each of a rank's groups, say nothing, and one
            more of these would be something else's.
        addresses: A regular expression of those where processes of the job may listen.
    """
    of_job = [at for at in found if at.kind != "unix" and at.program != "srun"]
    _fail_for([at for at in of_job if not re.fullmatch(addresses, at.address)])
    require("users", "" if IS_ROOT else "another user needs root")
    _fail_for([at for at in found if not is_known(at)])
    assert any(_is_engine(at) and at.heard.startswith("HTTP/1.1 401") for at in found), "no engine was tried in time"
    assert len(silent_sockets(found)) == num_silent, [at.program for at in silent_sockets(found)]
    page = (ROOT / "docs" / "threat-model.md").read_text()
    assert not [name for name in KNOWN if f"| {name} |" not in page]


def _is_engine(found: Listener) -> bool:
    return bool(re.fullmatch(KNOWN["engine"].program, found.program))


def _is_settled(found: Listener) -> bool:
    return is_known(found) and (found.heard.startswith("HTTP") or not _is_engine(found))


def silent_sockets(found: Sequence[Listener]) -> list[Listener]:
    """Return those of the trainer ranks that say nothing to another user, or end meanwhile."""
    return [at for at in found if at.program == RANK and re.fullmatch(f"nothing|{CLOSED}", at.heard)]


def _fail_for(sockets: Sequence[Listener]) -> None:
    assert not sockets, "\n".join(map(str, sockets))


def is_known(found: Listener) -> bool:
    """Tell whether a socket is on the list."""
    return any(known.covers(found) for known in KNOWN.values())


def listeners_of(processes: Sequence[psutil.Process]) -> list[Listener]:
    """Return the sockets of processes that others can send to, each in its own network namespace."""
    tables: dict[str, dict[str, list]] = {}
    found = []
    for process in processes:
        folder = Path("/proc") / str(process.pid)
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            network = (folder / "ns/net").readlink().name
            if network not in tables:
                tables[network] = {f"socket:[{inode}]": at for inode, *at in (*_inet(folder), *_unix(folder))}
            program, sockets = _program(process.cmdline()), tables[network].keys() & _open_files(folder)
            # One that is about to end has its files a moment longer than its command line.
            found += [Listener(program, *tables[network][name], network, process.pid) for name in sockets if program]
    return found


def _open_files(folder: Path) -> set[str]:
    names = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed
            names.add(os.readlink(descriptor))
    return names


def _inet(folder: Path) -> Iterator[tuple[str, str, str, int]]:
    for kind, state in LISTENS.items():
        for name in (kind, f"{kind}6"):
            for line in (folder / "net" / name).read_text().splitlines()[1:]:
                _, local, _, found, *rest = line.split()
                address, port = local.split(":")
                if found == state:
                    yield rest[5], kind, _readable(address), int(port, 16)


def _unix(folder: Path) -> Iterator[tuple[str, str, str, int]]:
    for line in (folder / "net" / "unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & UNIX_LISTENS:
            yield inode, "unix", (path or [""])[0].replace("@", "\0", 1), 0


def _readable(address: str) -> str:
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _program(command: Sequence[str]) -> str:
    """Return what a command line runs: the module behind -m, a script's name, else the program."""
    words = [word for word in command if word not in ("-B", "-P", "-u")]
    if "-m" in words[1:3]:
        return words[words.index("-m") + 1]
    is_python = bool(words) and "python" in Path(words[0]).name
    return Path(words[1] if is_python and len(words) > 1 else words[0] if words else "").name


def _heard_by_nobody(found: Sequence[Listener]) -> list[str]:
    """Return what another user hears at each socket, in the network namespace that it is in."""
    heard = dict.fromkeys(found, "closed")  # UDP has no connections: nothing is asked there
    for network in {at.network for at in found}:
        here = [at for at in found if at.network == network and at.kind != "udp"]
        if not here:
            continue
        inside = ["nsenter", f"--net=/proc/{here[0].pid}/ns/net"]
        places = json.dumps([[at.kind, _reachable(at.address), at.port] for at in here])
        command = [*inside, sys.executable, "-c", PROBE, str(NOBODY)]
        ended = subprocess.run(command, input=places, capture_output=True, text=True, timeout=60, check=False)
        if ended.returncode and not psutil.pid_exists(here[0].pid):
            continue  # nobody hears anything there any more
        assert ended.returncode == 0, ended.stderr
        heard |= dict(zip(here, json.loads(ended.stdout), strict=True))
    return list(heard.values())


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in ("0.0.0.0", "::") else address

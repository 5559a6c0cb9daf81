"""Registers servers: a file per server in the results folder, and leases on ports and GPUs.

    serving/{server}.json                       checkpoint, address and job
    serving/leases/{machine}/port-8000, gpu-0   held while the server runs (`store.lease`)

A server takes its leases before its GPUs, and deletes its file when it ends. After a kill the file remains, but its
leases have no living holder.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import CheckpointError, ConfigError, Problem, one_line
from posttrain.store import hash_file, read_json, read_receipt, receipt_of, write_json
from posttrain.store.lease import Holder, JobIsAlive, Lease, LeaseHeldError, is_process_of, living_holder, unknown

log = logging.getLogger(__name__)

FOLDER = "serving"
# Environment variables that limit the visible GPUs, of NVIDIA and AMD.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Server:
    """A server, as recorded in its file.

    Args:
        name: Name of the request: a run, a model, or a folder.
        checkpoint: Folder or repository of the checkpoint.
        digest: Digest of the checkpoint, see `digest_of`.
        engine: Kind of the engine.
        host: Its machine; empty while its job is queued.
        port: Port that it listens on.
        gpus: Its GPUs on that machine; empty on a CPU.
        job: The scheduler's job, as named in leases; empty without one.
    """

    name: str
    checkpoint: str
    digest: str
    engine: str
    host: str
    port: int
    gpus: tuple[str, ...] = ()
    job: str = ""

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}" if self.host else "nowhere yet"
        return one_line(f"{self.name} ({self.checkpoint}) at {where}{f' in {self.job}' if self.job else ''}")


def digest_of(folder: Path) -> str:
    """Return a checkpoint's identity: its receipt's digest, else the hash of its index or config."""
    if receipt_of(folder).is_file():
        return read_receipt(receipt_of(folder)).digest
    names = ("model.safetensors.index.json", "config.json")
    return next((hash_file(folder / name) for name in names if (folder / name).is_file()), "")


def visible_gpus(count: int) -> tuple[str, ...]:
    """Return the engine's GPUs on this machine: the first visible ones."""
    for name in VISIBLE:
        if os.environ.get(name):
            return tuple(os.environ[name].split(",")[:count])
    return tuple(map(str, range(count)))


def server_file(results: Path, server: Server) -> Path:
    """Return the path of a server's file; a job's file has the job's name, because a queued job has no machine yet."""
    name = server.job or f"{server.host}-{server.port}"
    return results / FOLDER / f"{_plain(name)}.json"


def write_server(results: Path, server: Server) -> Path:
    """Write a server's file and return its path."""
    path = server_file(results, server)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(server))
    return path


def read_servers(results: Path) -> list[tuple[Path, Server]]:
    """Return all servers in a results folder that did not end cleanly.

    Raises:
        CheckpointError: A file is not a server's.
    """
    found = []
    for path in sorted((results / FOLDER).glob("*.json")):
        try:
            content = read_json(path)
            server = Server(**{**content, "gpus": tuple(content["gpus"])})
            str(server)
        except FileNotFoundError:  # it just ended
            continue
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                "server-record-invalid", f"{path}: not of a server ({error})\n  remedy: delete it"
            ) from error
        found.append((path, server))
    return found


def holder_of(results: Path, server: Server, job_is_alive: JobIsAlive = unknown) -> Holder | None:
    """Return the serving process; None if it ended."""
    return living_holder(_lease_folder(results, server.host, f"port-{server.port}"), job_is_alive)


def is_server(results: Path, server: Server, holder: Holder) -> bool:
    """Return whether a process on this machine is the server, see `store.lease.is_process_of`."""
    return is_process_of(holder, _lease_folder(results, server.host, f"port-{server.port}"))


@contextmanager
def serving(results: Path, server: Server, job_is_alive: JobIsAlive = unknown, is_first: bool = True) -> Iterator[None]:
    """Hold leases on a server's port and GPUs, and register it, during the block.

    Args:
        results: Folder of leases.
        server: A server on this machine.
        job_is_alive: Queries the scheduler about the job of a lease's holder.
        is_first: The first node serves requests and registers the port; other nodes only lease GPUs.

    Raises:
        ConfigError: A live process holds the port or a GPU; the message names it.
    """
    for path, other in read_servers(results):
        # A queued job has no machine yet.
        if other.host == server.host and holder_of(results, other, job_is_alive) is None:
            log.warning("%s was killed: its lease is stale, and taken away", other)
            path.unlink(missing_ok=True)
    with ExitStack() as stack:
        remedy = "--port gives another one"
        wanted = [(f"port-{server.port}", f"port {server.port}", remedy)] if is_first else []
        more = "CUDA_VISIBLE_DEVICES gives others"
        wanted += [(f"gpu-{_plain(gpu)}", f"GPU {gpu}", more) for gpu in server.gpus]
        for folder, what, remedy in wanted:
            lease = Lease(
                Path(what), _lease_folder(results, server.host, folder), job=server.job, job_is_alive=job_is_alive
            )
            try:
                stack.enter_context(lease)
                # The open file proves to `--stop` that this process is the server.
                stack.enter_context(lease.path.open("rb"))
            except LeaseHeldError as error:
                raise ConfigError([_taken(results, server, folder, what, remedy, job_is_alive)]) from error
        if is_first:
            stack.callback(write_server(results, server).unlink, missing_ok=True)
        yield


def _taken(results: Path, server: Server, folder: str, what: str, remedy: str, job_is_alive: JobIsAlive) -> Problem:
    holder = living_holder(_lease_folder(results, server.host, folder), job_is_alive)
    known = [other for _, other in read_servers(results) if other.host == server.host]
    serves = [other for other in known if f"port-{other.port}" == folder or folder[4:] in map(_plain, other.gpus)]
    named = f", which serves {serves[0]}" if serves else ""
    stop = f"`posttrain serve {serves[0].name} --stop` ends it, or " if serves else ""
    return Problem("port-in-use", what, f"has {holder}{named}", f"a free one of {server.host}", stop + remedy)


def _lease_folder(results: Path, host: str, name: str) -> Path:
    return results / FOLDER / "leases" / _plain(host) / name


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]", "-", text)


def this_machine() -> str:
    """Return this machine's name in leases."""
    return socket.gethostname()


def named(servers: Sequence[tuple[Path, Server]], name: str) -> list[tuple[Path, Server]]:
    """Return the servers of a request's name, a folder, or a job number; all for an empty name."""
    if not name:
        return list(servers)
    asked = str(Path(name).expanduser().absolute())

    def is_meant(server: Server) -> bool:
        return name in (server.name, server.job.partition(":")[2]) or server.checkpoint == asked

    return [(path, server) for path, server in servers if is_meant(server)]

"""The lease on a folder: at most one process writes to it, also when an orphan of a dead driver lives on.

A lease is a file `epoch-000007.json` that is made with a hard link: `link()` fails when the name exists, on local and
on shared file systems, also where `flock` does not reach other nodes. The highest epoch is the holder. A new process
takes the next epoch when the holder has released it or is dead; the old one, should it still run, finds a higher epoch
when it checks before its next commit, and stops (fencing).

Dead means: where the holder's process ids are ours (same host, start of the machine and process namespace), no process
with its id and start time; elsewhere, no heartbeat for `HEARTBEAT_DEAD_SECONDS`.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from posttrain.artifacts.durable import sync_folder, write_json

HEARTBEAT_SECONDS = 5.0
HEARTBEAT_DEAD_SECONDS = 120.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LeaseLostError(RuntimeError):
    """Another process holds the folder: whoever gets this must not write any more."""


class LeaseHeldError(RuntimeError):
    """Somebody alive holds the folder."""


@dataclass(frozen=True)
class Holder:
    """Who holds an epoch.

    Args:
        epoch: From 1, one higher for each holder.
        host: Its node.
        pid: Its process id there.
        process_ids: Where that id means this process: start of the machine and process namespace.
        started_ticks: When the process started, in clock ticks since the machine did; tells it from a later one
            with the same id.
        user: Whose process it is.
        since_unix: When it took the lease.
    """

    epoch: int
    host: str
    pid: int
    process_ids: str
    started_ticks: int
    user: str
    since_unix: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix))
        return f"process {self.pid} on {self.host} (user {self.user}, since {since})"


class Lease:
    """The right to write; a context manager that releases it on a clean end.

    Args:
        subject: What may be written, for messages.
        folder: Where the lease's own files lie.
        wait_seconds: For a holder on another host to be known as dead. Who is started in a dead one's place knows that
            it is, but sees its last heartbeat.

    Raises:
        LeaseHeldError: On entry, when somebody alive holds it.
    """

    def __init__(self, subject: Path, folder: Path, wait_seconds: float = 0.0):
        self._subject = subject
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._holder: Holder | None = None
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._holder = self._acquire()
        self._beat()
        threading.Thread(target=self._keep_beating, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if read_holder(self._folder) == self._holder:
            write_json(_released_path(self._folder, self.epoch), {"unix": time.time()})

    @property
    def epoch(self) -> int:
        """Our epoch; commits carry it."""
        assert self._holder is not None, "the lease is not held"
        return self._holder.epoch

    @property
    def folder(self) -> Path:
        """The folder that `check_epoch` reads."""
        return self._folder

    def _acquire(self) -> Holder:
        wait_until = time.monotonic() + self._wait_seconds
        while (current := read_holder(self._folder)) is not None and not _is_free(self._folder, current):
            if (remaining := wait_until - time.monotonic()) > 0:
                time.sleep(min(HEARTBEAT_SECONDS, remaining))
                continue
            raise LeaseHeldError(
                f"{self._subject} is being written by {current}; wait for it to end, or end it, then run again"
            )
        mine = _this_process((current.epoch if current else 0) + 1)
        # The heartbeat first: whoever sees the epoch finds its holder alive.
        _heartbeat_path(self._folder, mine.epoch).touch()
        offer = self._folder / f".offer-{mine.host}-{mine.pid}-{threading.get_native_id()}.json"
        write_json(offer, asdict(mine))
        epoch_path = _epoch_path(self._folder, mine.epoch)
        try:
            os.link(offer, epoch_path)
        except OSError as error:
            # The error alone does not tell: NFS may repeat a request whose answer was lost, and then find our own
            # link; SFTP says only "failure".
            if not epoch_path.exists():
                raise
            if epoch_path.read_text() != offer.read_text():
                raise LeaseHeldError(f"{self._subject}: another process was faster; run again to follow it") from error
        finally:
            offer.unlink()
        sync_folder(self._folder)
        return mine

    def _keep_beating(self) -> None:
        # Whoever deletes the lease's folder under us has lost it for us; the next `check_epoch` tells.
        with contextlib.suppress(FileNotFoundError):
            while not self._stop.wait(HEARTBEAT_SECONDS):
                self._beat()

    def _beat(self) -> None:
        _heartbeat_path(self._folder, self.epoch).touch()


def read_holder(lease_folder: Path) -> Holder | None:
    """Return the holder of the highest epoch, released or not."""
    epochs = sorted(lease_folder.glob("epoch-*.json"))
    return Holder(**json.loads(epochs[-1].read_text())) if epochs else None


def living_holder(lease_folder: Path) -> Holder | None:
    """Return who holds the lease now; None when nobody does, or somebody dead."""
    holder = read_holder(lease_folder)
    return None if holder is None or _is_free(lease_folder, holder) else holder


def check_epoch(lease_folder: Path, epoch: int) -> None:
    """Make sure that `epoch` is still the highest; call it right before something becomes visible to others.

    Raises:
        LeaseLostError: When a later process has taken over.
    """
    holder = read_holder(lease_folder)
    if holder is None or holder.epoch != epoch:
        raise LeaseLostError(f"{lease_folder}: epoch {epoch} was superseded by {holder}; nothing was written")


def _this_process(epoch: int) -> Holder:
    return Holder(
        epoch=epoch,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_ids=_process_ids(),
        started_ticks=_started_ticks(os.getpid()) or 0,
        user=user_name(),
        since_unix=round(time.time(), 3),
    )


def _is_free(folder: Path, holder: Holder) -> bool:
    if _released_path(folder, holder.epoch).exists():
        return True
    if (holder.host, holder.process_ids) == (socket.gethostname(), _process_ids()):
        return _started_ticks(holder.pid) != holder.started_ticks
    heartbeat = _heartbeat_path(folder, holder.epoch)
    age = time.time() - heartbeat.stat().st_mtime if heartbeat.exists() else float("inf")
    return age > HEARTBEAT_DEAD_SECONDS


def _process_ids() -> str:
    """Return a name for the set of process ids that we see: containers on one host may each have their own."""
    return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started_ticks(pid: int) -> int | None:
    """Return when a process started, None when it does not run. Ticks, unlike seconds, do not move with the clock."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything; behind it, state is the 1st word and the start time the 20th.
    words = status.rpartition(")")[2].split()
    return None if words[0] in "ZX" else int(words[19])


def user_name() -> str:
    """Return who we are, as a number where the machine has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _epoch_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.json"


def _heartbeat_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.heartbeat"


def _released_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.released"

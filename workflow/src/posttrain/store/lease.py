"""The lease on a folder: at most one process writes to it, even if an orphan of a dead driver is still running.

A lease is a file `epoch-000007.json` that is made with a hard link: `link()` fails if the name exists, on local and
shared file systems, including those where `flock` does not reach other nodes. The highest epoch is the holder. A new
process takes the next epoch when the holder has released its lease or is dead; if the old process still runs, it finds
the higher epoch when it checks before its next commit, and stops (fencing).

A holder is dead if
- its process ids are comparable (same host, boot and process namespace) and no process has its id and start time;
- it runs in a job whose scheduler reports that the job is over (another process of the same job is the job's next run,
  and takes over);
- otherwise, if there was no heartbeat for `HEARTBEAT_DEAD_SECONDS`. Clocks of different machines differ, are adjusted,
  and stop while a machine is suspended, so the new process measures this time with its own monotonic clock.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from posttrain.errors import CheckpointError, one_line
from posttrain.store.durable import write_json, write_new
from posttrain.store.plain_json import read_json
from posttrain.store.processes import process_ids, started_ticks, user_name

log = logging.getLogger(__name__)

# Shared file systems may show changes of other nodes up to a minute late: wait twice as long, or 24 heartbeats.
HEARTBEAT_SECONDS = 5.0
HEARTBEAT_DEAD_SECONDS = 120.0
# An older heartbeat is watched for a minute and one beat before its holder counts as dead.
WATCH_SECONDS = 65.0
_EPOCH = re.compile(r"epoch-(\d+)\.json")


# Job -> whether it is running or queued; None if unknown.
JobIsAlive = Callable[[str], bool | None]


def unknown(job: str) -> None:
    """Return None, because without a scheduler the state of jobs is unknown."""


class LeaseLostError(RuntimeError):
    """Another process holds the folder, so this process must not write any more."""


class LeaseHeldError(RuntimeError):
    """A live process holds the folder."""


@dataclass(frozen=True)
class Holder:
    """The holder of an epoch.

    Args:
        epoch: From 1, one higher for each holder.
        host: Node of the process.
        pid: Its process id on that node.
        process_ids: Boot and process namespace in which the id is valid.
        started_ticks: Start time of the process in clock ticks since boot; distinguishes it from a later process
            with the same id.
        user: Owner of the process.
        since_unix: Time at which it took the lease.
        job: Its scheduler job, or "".
    """

    epoch: int
    host: str
    pid: int
    process_ids: str
    started_ticks: int
    user: str
    since_unix: float
    job: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix))
        job = f" in {self.job}" if self.job else ""
        return one_line(f"process {self.pid} on {self.host}{job} (user {self.user}, since {since})")


class Lease:
    """The right to write; a context manager that releases it on a clean end.

    Args:
        subject: The protected thing, for messages.
        folder: Folder of the lease's own files.
        job: The scheduler job of this process, or "".
        job_is_alive: Returns whether a holder's job is alive; None if unknown.
        wait_seconds: How long to wait until a holder on another host counts as dead. A process that replaces a dead
            one still sees its last heartbeat.

    Raises:
        LeaseHeldError: On entry, if a live process holds the lease. Entry may have to watch the heartbeat to find out.
    """

    def __init__(
        self,
        subject: Path,
        folder: Path,
        job: str = "",
        job_is_alive: JobIsAlive = unknown,
        wait_seconds: float = 0.0,
    ):
        self._subject = subject
        self._folder = folder
        self._job, self._job_is_alive, self._wait_seconds = job, job_is_alive, wait_seconds
        self._holder: Holder | None = None
        self._watch = _Watch(subject, folder)
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._holder = self._acquire()
        threading.Thread(target=self._keep_beating, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        try:
            if read_holder(self._folder) == self._holder:
                write_json(_released_path(self._folder, self.epoch), {"unix": time.time()})
        except OSError as unwritten:
            # Do not hide an earlier error. Other processes notice that this process or its heartbeat has ended.
            log.warning("the lease on %s could not be given back: %s", self._subject, unwritten)

    @property
    def epoch(self) -> int:
        """The epoch of this process, which its commits contain."""
        assert self._holder is not None, "the lease is not held"
        return self._holder.epoch

    @property
    def folder(self) -> Path:
        """The folder for `check_epoch`."""
        return self._folder

    @property
    def path(self) -> Path:
        """The file that names this process as the holder."""
        return lease_file(self._folder, self.epoch)

    def _acquire(self) -> Holder:
        wait_until = time.monotonic() + self._wait_seconds
        while (current := read_holder(self._folder)) is not None:
            if (is_alive := self._is_alive(current)) is False:
                break
            remaining = wait_until - time.monotonic()
            if is_alive and remaining <= 0:
                raise LeaseHeldError(
                    f"{self._subject} is being written by {current}; wait for it to end, or end it, then run again"
                )
            time.sleep(min(HEARTBEAT_SECONDS, remaining) if is_alive else HEARTBEAT_SECONDS)
        mine = _this_process((current.epoch if current else 0) + 1, self._job)
        # Start the heartbeat first, so that a process that sees the epoch finds its holder alive.
        heartbeat = _heartbeat_path(self._folder, mine.epoch)
        os.close(os.open(heartbeat, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
        os.utime(heartbeat, follow_symlinks=False)
        try:
            write_new(lease_file(self._folder, mine.epoch), json.dumps(asdict(mine)))
        except FileExistsError as error:
            raise LeaseHeldError(f"{self._subject}: another process was faster; run again to follow it") from error
        return mine

    def _is_alive(self, current: Holder) -> bool | None:
        """Return whether the lease is held; None while unknown."""
        # A scheduler runs a job only once at a time; a run that it has lost track of is fenced off by our epoch.
        if self._job and current.job == self._job and not _is_here(current):
            return False
        is_free = _is_known_free(self._folder, current, self._job_is_alive)
        return self._watch.is_alive(current) if is_free is None else not is_free

    def _keep_beating(self) -> None:
        is_failing = False
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                # Never recreate the file: another process that deleted it took over, and the next `check_epoch` raises.
                os.utime(_heartbeat_path(self._folder, self.epoch), follow_symlinks=False)
                is_failing = False
            except OSError as error:
                if not is_failing:
                    log.warning("no heartbeat in %s, it is tried again: %s", self._folder, error)
                is_failing = True


class _Watch:
    """Polls whether a heartbeat continues.

    Args:
        subject: The protected thing, for messages.
        folder: Folder of the lease.
    """

    def __init__(self, subject: Path, folder: Path):
        self._subject, self._folder = subject, folder
        self._epoch, self._beat_ns, self._since = 0, 0, 0.0
        self._has_changed = False

    def is_alive(self, holder: Holder) -> bool | None:
        """Return whether a holder is alive; None if its heartbeat has to be watched for longer."""
        try:
            beat = _heartbeat_path(self._folder, holder.epoch).stat()
        except FileNotFoundError:
            return False
        age, now = time.time() - beat.st_mtime, time.monotonic()
        is_first = holder.epoch != self._epoch
        if is_first or beat.st_mtime_ns != self._beat_ns:
            self._has_changed = not is_first
            self._epoch, self._beat_ns, self._since = holder.epoch, beat.st_mtime_ns, now
        if now - self._since >= (WATCH_SECONDS if age > HEARTBEAT_DEAD_SECONDS else HEARTBEAT_DEAD_SECONDS):
            return False
        if self._has_changed or abs(age) <= HEARTBEAT_DEAD_SECONDS:
            return True
        if is_first:
            when = f"{age:,.0f} s ago" if age > 0 else f"{-age:,.0f} s in the future"
            log.warning("%s: the last sign of life of %s is %s; watching for another", self._subject, holder, when)
        return None


def read_holder(lease_folder: Path) -> Holder | None:
    """Return the holder of the highest epoch, released or not.

    Raises:
        OSError: The folder exists but cannot be read, which does not mean that there is no holder.
        CheckpointError: The file does not describe a holder.
    """
    try:
        epochs = [(int(match[1]), name) for name in os.listdir(lease_folder) if (match := _EPOCH.fullmatch(name))]
    except FileNotFoundError:
        return None
    if not epochs:
        return None
    epoch, name = max(epochs)
    path = lease_folder / name
    try:
        holder = Holder(**read_json(path))
        str(holder)  # The value is shown in messages, which must not fail.
        if holder.epoch != epoch:
            raise ValueError(f"epoch {holder.epoch}")
    except (ValueError, TypeError, OverflowError) as error:
        remedy = f"delete {lease_folder} when nobody works there"
        raise CheckpointError("lease-invalid", f"{path}: not a lease ({error})\n  remedy: {remedy}") from error
    return holder


def living_holder(lease_folder: Path, job_is_alive: JobIsAlive = unknown) -> Holder | None:
    """Return the lease's live holder, or None; checks once, without watching the heartbeat.

    Args:
        lease_folder: See `Lease`.
        job_is_alive: See `Lease`.
    """
    holder = read_holder(lease_folder)
    return None if holder is None or _is_free(lease_folder, holder, job_is_alive) else holder


def heartbeat_age_seconds(lease_folder: Path, holder: Holder) -> float:
    """Return the time since a holder's last heartbeat, or infinity if there was none."""
    try:
        return time.time() - _heartbeat_path(lease_folder, holder.epoch).stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def check_epoch(lease_folder: Path, epoch: int) -> None:
    """Check that `epoch` is still the highest; call this right before publishing something.

    Raises:
        LeaseLostError: A later process has taken over.
    """
    holder = read_holder(lease_folder)
    if holder is None or holder.epoch != epoch:
        raise LeaseLostError(f"{lease_folder}: epoch {epoch} was superseded by {holder}; nothing was written")


def _this_process(epoch: int, job: str) -> Holder:
    return Holder(
        epoch=epoch,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_ids=process_ids(),
        started_ticks=started_ticks(os.getpid()) or 0,
        user=user_name(),
        since_unix=round(time.time(), 3),
        job=job,
    )


def is_process_of(holder: Holder, lease_folder: Path) -> bool:
    """Return whether the holder's process id belongs, on this machine, to the process that took the lease.

    Others may be able to write the lease's file, so its content is not trusted: the process must have the holder's
    start time and user, and keep the lease's file open (see `Lease.path`), which no other process can fake.

    Raises:
        PermissionError: The process belongs to another user.
    """
    if not _is_here(holder) or started_ticks(holder.pid) != holder.started_ticks:
        return False
    process = Path(f"/proc/{holder.pid}")
    try:
        opened = [os.stat(entry) for entry in (process / "fd").iterdir() if entry.exists()]
        is_ours = process.stat().st_uid == os.geteuid()
    except FileNotFoundError:  # the process has just ended
        return False
    return is_ours and any(os.path.samestat(one, lease_file(lease_folder, holder.epoch).stat()) for one in opened)


def _is_free(folder: Path, holder: Holder, job_is_alive: JobIsAlive) -> bool:
    is_free = _is_known_free(folder, holder, job_is_alive)
    return heartbeat_age_seconds(folder, holder) > HEARTBEAT_DEAD_SECONDS if is_free is None else is_free


def _is_known_free(folder: Path, holder: Holder, job_is_alive: JobIsAlive) -> bool | None:
    """Return whether the lease is free; None if only its heartbeat can answer that."""
    if _released_path(folder, holder.epoch).exists():
        return True
    if _is_here(holder):
        return started_ticks(holder.pid) != holder.started_ticks
    is_alive = job_is_alive(holder.job) if holder.job else None
    return None if is_alive is None else not is_alive


def _is_here(holder: Holder) -> bool:
    """Return whether the holder's process id is valid in this boot and process namespace."""
    return (holder.host, holder.process_ids) == (socket.gethostname(), process_ids())


def lease_file(folder: Path, epoch: int) -> Path:
    """Return the file that names the holder of an epoch."""
    return folder / f"epoch-{epoch:06d}.json"


def _heartbeat_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.heartbeat"


def _released_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.released"

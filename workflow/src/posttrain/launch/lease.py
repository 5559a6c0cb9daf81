"""The lease on a run folder: at most one supervisor writes to it, also when an orphan of a dead driver lives on.

A lease is a file `lease/epoch-000007.json` that is made with a hard link: `link()` fails when the name exists, on local
and on shared file systems, also where `flock` does not reach other nodes. The highest epoch is the holder. A new
supervisor takes the next epoch when the holder has released it or is dead; the old one, should it still run, finds a
higher epoch when it checks before its next commit, and stops (fencing).

Dead means: on this host, no process with the holder's id and start time; on another host, no heartbeat for
`HEARTBEAT_DEAD_SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from posttrain import artifacts

HEARTBEAT_SECONDS = 5.0
HEARTBEAT_DEAD_SECONDS = 120.0


class LeaseLostError(RuntimeError):
    """Another supervisor holds the run: whoever gets this must not write any more."""


@dataclass(frozen=True)
class Holder:
    """Who holds an epoch.

    Args:
        epoch: From 1, one higher for each supervisor.
        host: Its node.
        pid: Its process id there.
        started: Start time of the process, to tell it from a later one with the same id.
    """

    epoch: int
    host: str
    pid: int
    started: float


class Lease:
    """The right to write to a run folder; a context manager that releases it on a clean end.

    Args:
        run_folder: Folder of the training run.

    Raises:
        RuntimeError: On entry, when somebody alive holds the run.
    """

    def __init__(self, run_folder: Path):
        self._folder = run_folder / "lease"
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
            artifacts.write_json(self._released_path(self.epoch), {"unix": time.time()})

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
        current = read_holder(self._folder)
        if current is not None and not self._is_free(current):
            raise RuntimeError(
                f"{self._folder.parent} is being written by process {current.pid} on {current.host} "
                f"(epoch {current.epoch}); wait for it to end, or end it, then run again"
            )
        mine = Holder(
            epoch=(current.epoch if current else 0) + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )
        offer = self._folder / f".offer-{mine.host}-{mine.pid}.json"
        artifacts.write_json(offer, asdict(mine))
        try:
            os.link(offer, _epoch_path(self._folder, mine.epoch))
        except FileExistsError as error:
            raise RuntimeError(
                f"{self._folder.parent}: another supervisor was faster; run again to follow it"
            ) from error
        finally:
            offer.unlink()
        artifacts.sync_folder(self._folder)
        return mine

    def _is_free(self, holder: Holder) -> bool:
        if self._released_path(holder.epoch).exists():
            return True
        if holder.host == socket.gethostname():
            return not _is_running(holder)
        heartbeat = self._heartbeat_path(holder.epoch)
        age = time.time() - heartbeat.stat().st_mtime if heartbeat.exists() else float("inf")
        return age > HEARTBEAT_DEAD_SECONDS

    def _keep_beating(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._heartbeat_path(self.epoch).touch()

    def _heartbeat_path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:06d}.heartbeat"

    def _released_path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:06d}.released"


def read_holder(lease_folder: Path) -> Holder | None:
    """Return the holder of the highest epoch, released or not."""
    epochs = sorted(lease_folder.glob("epoch-*.json"))
    return Holder(**json.loads(epochs[-1].read_text())) if epochs else None


def check_epoch(lease_folder: Path, epoch: int) -> None:
    """Make sure that `epoch` is still the highest; call it right before something becomes visible to others.

    Raises:
        LeaseLostError: When a later supervisor has taken over.
    """
    holder = read_holder(lease_folder)
    if holder is None or holder.epoch != epoch:
        raise LeaseLostError(f"{lease_folder.parent}: epoch {epoch} was superseded by {holder}; nothing was written")


def _epoch_path(lease_folder: Path, epoch: int) -> Path:
    return lease_folder / f"epoch-{epoch:06d}.json"


def _is_running(holder: Holder) -> bool:
    try:
        process = psutil.Process(holder.pid)
        return process.create_time() == holder.started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Discovery of nodes that copy the same files, through a folder on shared storage.

    {node}.json         address of a node, its complete, claimed and incomplete files; its mtime is its heartbeat
    {content}.claim     the node that reads a file from its origin; advisory, a second reader would do no harm
    {content}.torrent   hashes of the file's pieces

Files are named after their content. Nothing is synced, because lost files are written again. Shared storage is busy
during the copy, so each refresh costs one listing, and a record is read only after it has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.store.plain_json import read_json

# Several heartbeats fit into the timeout of a dead node, and the load on busy storage stays low.
HEARTBEAT_SECONDS = 10.0
# Some file systems have timestamps of whole seconds: a younger file may change again with the same timestamp.
FRESH_SECONDS = 3.0
# Records read at a time: each takes several round trips to busy storage.
NUM_READERS = 16
# A node without a heartbeat for this long is dead: its claims are free, and no node waits for it. Shared file
# systems may show other nodes' changes a minute late.
DEAD_SECONDS = 120.0


@dataclass(frozen=True)
class Peer:
    """A node that is copying now, from its own record.

    Args:
        addresses: Its address in each of its networks.
        port: Its port.
        has: Complete files.
        reads: Files that it reads from their origins.
        fetches: Incomplete files.
        is_done: Whether it has all files and waits for the others.
    """

    addresses: Sequence[str]
    port: int
    has: Sequence[str]
    reads: Sequence[str]
    fetches: Sequence[str]
    is_done: bool


class PeerRegistry:
    """One node's view of the folder at the last `refresh`.

    Args:
        folder: Folder, equal on all nodes that copy the same files.
        node: This node's name.
    """

    def __init__(self, folder: Path, node: str):
        self._folder, self._node = folder, node
        folder.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(NUM_READERS)
        self._records: dict[str, tuple[int, Peer]] = {}
        self._times: dict[str, float] = {}
        self._claimed: set[str] = set()
        self._said: Peer | None = None
        self._said_at = 0.0

    def refresh(self) -> None:
        """Update the view from the folder."""
        with os.scandir(self._folder) as entries:
            found = {entry.name: status for entry in entries if (status := _status(entry))}
        self._times = {name: status.st_mtime for name, status in found.items()}
        mine = f"{self._node}.json"
        names = {name for name in found if name.endswith(".json") and name != mine and self._is_alive(name)}
        self._records = {name: self._records[name] for name in names & self._records.keys()}
        changed = [name for name in names if self._may_have_changed(name, found[name])]
        for name, peer in zip(changed, self._pool.map(self._read, changed), strict=True):
            if peer:
                self._records[name] = found[name].st_mtime_ns, peer

    def _may_have_changed(self, name: str, status: os.stat_result) -> bool:
        is_fresh = time.time() - status.st_mtime < FRESH_SECONDS
        return is_fresh or name not in self._records or self._records[name][0] != status.st_mtime_ns

    def _read(self, name: str) -> Peer | None:
        # During a replacement, shared file systems may return no, half or old content: the next refresh retries.
        with contextlib.suppress(OSError, ValueError):
            return Peer(**read_json(self._folder / name))
        return None

    @property
    def peers(self) -> list[Peer]:
        """The other live nodes."""
        return [peer for _, (_, peer) in sorted(self._records.items())]

    def torrent(self, content: str) -> Path:
        """Return the path of a file's torrent."""
        return self._folder / f"{content}.torrent"

    def has_torrent(self, content: str) -> bool:
        """Return whether the file's torrent exists."""
        return f"{content}.torrent" in self._times

    def being_read(self) -> set[str]:
        """Return the files that other nodes read from their origins now, or have just claimed."""
        oldest = time.time() - HEARTBEAT_SECONDS
        recent = {name for name, seen in self._times.items() if name.endswith(".claim") and seen > oldest}
        said = {content for peer in self.peers for content in peer.reads}
        here = {content for peer in self.peers for content in peer.has}
        return ({name.removesuffix(".claim") for name in recent} | said) - here

    def claim(self, content: str) -> bool:
        """Claim a file for this node to read; False if another live node has claimed it.

        A claim stays after its file is complete, because others may not have seen that yet.
        """
        name = f"{content}.claim"
        path = self._folder / name
        if name in self._times:
            with contextlib.suppress(OSError):
                claimant = path.read_text(encoding="utf-8")
                if claimant == self._node or not (self._is_alive(name) or self._is_alive(f"{claimant}.json")):
                    path.unlink()
            return False
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self._node)
        except OSError:
            # Another node was faster. Not every file system raises FileExistsError: SFTP returns a generic failure.
            if not path.exists():
                raise
            return False
        self._times[name] = time.time()
        self._claimed.add(content)
        return True

    def say(self, state: Peer) -> None:
        """Publish this node's record if it has changed or a heartbeat is due."""
        path = self._folder / f"{self._node}.json"
        if state != self._said:
            path.write_text(json.dumps(asdict(state)), encoding="utf-8")
        elif time.monotonic() - self._said_at > HEARTBEAT_SECONDS:
            os.utime(path)
        else:
            return
        self._said, self._said_at = state, time.monotonic()

    def leave(self) -> None:
        """Remove this node's record and claims."""
        self._pool.shutdown()
        for name in (f"{self._node}.json", *(f"{content}.claim" for content in self._claimed)):
            (self._folder / name).unlink(missing_ok=True)

    def _is_alive(self, name: str) -> bool:
        return time.time() - self._times.get(name, 0.0) < DEAD_SECONDS


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return entry.stat()
    return None

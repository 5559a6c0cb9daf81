"""Copying to many nodes at once: shared storage is read once, and the nodes pass the files on to one another.

Each file is read from its origin by the node that first claims it. When it is on that node's disk and its hash is
right, the node makes a torrent of it and tells the others, who fetch it by BitTorrent (libtorrent) from everybody who
has any of it. No node is special: one that dies is replaced by whoever claims next, one that comes late finds what
there is, and one that comes last and alone reads the origin.

The nodes meet in a folder on shared storage:

    {node}.json         where a node listens, which files it has and fetches; its modification time is its heartbeat
    {hash}.claim        the node that reads a file from its origin; advice only, a second reader would do no harm
    {hash}.torrent      hashes of the file's pieces; named, as the file is among the nodes, after its content

A file that was fetched counts only when our own hash of the whole agrees, and is synced. What a killed node had
fetched is used by its next attempt: BitTorrent checks it piece by piece.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts import hash_file, write_json
from posttrain.checkpoint.file_placement import TransferProgress, explain_full_disk, publish_link
from posttrain.checkpoint.node_local import CopyTask, copy_task
from posttrain.checkpoint.swarm import Swarm
from posttrain.observability.progress import ProgressBar

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# A node that has not shown itself for this long is dead: its claims are free, and nobody waits for it.
DEAD_SECONDS = 120.0
# A download without progress for this long is given up, and the origin read instead.
STALL_SECONDS = 60.0
MAX_READS, MAX_DOWNLOADS = 2, 8
SCRATCH = ".broadcast"


@dataclass(frozen=True)
class Peer:
    """Another node that copies now.

    Args:
        addresses: Where it listens, on each of its networks.
        port: At this port.
        has: Files that it has, by their hashes.
        fetches: Files that it has parts of.
        is_done: It needs no more and waits for the others.
    """

    addresses: tuple[str, ...]
    port: int
    has: frozenset[str]
    fetches: frozenset[str]
    is_done: bool


class Broadcast:
    """A node's part in copying to many.

    Args:
        meeting: Folder on shared storage; the same for all nodes that copy the same.
        node: Name of this node.
        destination: Folder on this node's own disk; parts of files lie in a hidden folder below it.
    """

    def __init__(self, meeting: Path, node: str, destination: Path):
        self._meeting, self._node = meeting, node
        self._scratch = destination / SCRATCH

    def fetch(self, wrong: Sequence[CopyTask], right: Sequence[CopyTask]) -> None:
        """Bring `wrong` to this node, and give `right` and what has come to others while they need it.

        Raises:
            CheckpointError: An origin's file is not what its receipt says.
            RuntimeError: The disk is full.
        """
        for folder in (self._meeting, self._scratch):
            folder.mkdir(parents=True, exist_ok=True)
        total = sum(task.record.size_bytes for task in wrong)
        with (
            ProgressBar(f"copy to {self._scratch.parent}", total) as bar,
            explain_full_disk(self._scratch.parent),
            Swarm(self._scratch) as swarm,
            ThreadPoolExecutor(MAX_READS + 1) as pool,
        ):
            exchange = _Exchange(self._meeting, self._node, swarm, pool, TransferProgress(bar))
            exchange.run(_by_content(wrong), _by_content(right))
        shutil.rmtree(self._scratch)


class _Exchange:
    """The state of one `fetch`."""

    def __init__(self, meeting: Path, node: str, swarm: Swarm, pool: ThreadPoolExecutor, progress: TransferProgress):
        self._meeting, self._node, self._swarm, self._pool = meeting, node, swarm, pool
        self._progress = progress
        self._record: dict[str, object] = {}
        self._has: set[str] = set()
        # What is under way: read from the origin, fetched from peers, checked after that.
        self._reads: dict[str, Future[None]] = {}
        self._downloads: dict[str, float] = {}
        self._checks: dict[str, Future[bool]] = {}
        self._unreachable: set[str] = set()
        self._claimed: set[str] = set()

    def run(self, wrong: dict[str, list[CopyTask]], right: dict[str, list[CopyTask]]) -> None:
        """Work until nothing is missing here, then until nobody alive misses anything."""
        missing = dict(_shuffled(wrong, self._node))
        for content, tasks in right.items():
            self._offer(content, tasks[0])
        try:
            while missing or not all(peer.is_done for peer in self._peers()):
                peers = self._peers()
                self._collect(missing)
                for content, tasks in missing.items():
                    if not self._is_under_way(content):
                        self._begin(content, tasks[0], peers)
                self._tend_downloads(peers)
                self._announce(is_done=not missing)
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._progress.stop()
            raise
        finally:
            self._leave()

    # ---- one file ----

    def _is_under_way(self, content: str) -> bool:
        return content in self._reads or content in self._downloads or content in self._checks

    def _begin(self, content: str, task: CopyTask, peers: Sequence[Peer]) -> None:
        """Fetch a file that a peer has, or read it from its origin if nobody else does."""
        is_offered = content not in self._unreachable and any(content in peer.has for peer in peers)
        if is_offered and self._torrent(content).exists():
            if len(self._downloads) < MAX_DOWNLOADS:
                self._swarm.download(content, self._torrent(content))
                self._downloads[content] = time.monotonic()
        elif len(self._reads) < MAX_READS and (content in self._unreachable or self._claim(content)):
            self._reads[content] = self._pool.submit(self._read, content, task)

    def _read(self, content: str, task: CopyTask) -> None:
        copy_task(task, self._progress)
        self._swarm.make_torrent(content, task.target, self._torrent(content))

    def _offer(self, content: str, task: CopyTask) -> None:
        """Let others fetch a file that lies here and is right."""
        if not self._torrent(content).exists():
            self._swarm.make_torrent(content, task.target, self._torrent(content))
        self._swarm.seed(content, task.target, self._torrent(content))
        self._has.add(content)

    def _collect(self, missing: dict[str, list[CopyTask]]) -> None:
        """Take note of files that are here now."""
        for content in _finished(self._reads):
            self._reads.pop(content).result()
            self._arrived(content, missing)
        for content in list(self._downloads):
            if self._swarm.is_complete(content):
                del self._downloads[content]
                self._checks[content] = self._pool.submit(self._check, content, missing[content][0])
        for content in _finished(self._checks):
            if self._checks.pop(content).result():
                self._arrived(content, missing)
            else:
                log.warning("%s came with other bytes from its peers; it is read from its origin", content)
                self._give_up(content)

    def _check(self, content: str, task: CopyTask) -> bool:
        """Put a fetched file under its name when its bytes are right."""
        if hash_file(self._swarm.path(content)) != content:
            return False
        publish_link(self._swarm.path(content), task.target)
        self._progress.advance(task.record.size_bytes)
        return True

    def _arrived(self, content: str, missing: dict[str, list[CopyTask]]) -> None:
        first, *twins = missing.pop(content)
        for twin in twins:
            publish_link(first.target, twin.target)
            self._progress.advance(twin.record.size_bytes)
        self._offer(content, first)

    # ---- peers ----

    def _tend_downloads(self, peers: Sequence[Peer]) -> None:
        """Bring downloads together with those who have the file, and end those that lead nowhere."""
        for content, since in list(self._downloads.items()):
            useful = [peer for peer in peers if content in peer.has or content in peer.fetches]
            self._swarm.connect(content, [(host, peer.port) for peer in useful for host in peer.addresses])
            if self._swarm.has_progressed(content):
                self._downloads[content] = time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                log.warning("%s does not come from its peers; it is read from its origin", content)
                self._give_up(content)
            elif not any(content in peer.has for peer in peers):
                # Whoever had it is gone; somebody claims it again.
                self._swarm.drop(content)
                del self._downloads[content]

    def _give_up(self, content: str) -> None:
        self._swarm.drop(content)
        self._downloads.pop(content, None)
        self._unreachable.add(content)

    def _peers(self) -> list[Peer]:
        return [
            peer
            for path in sorted(self._meeting.glob("*.json"))
            if path.stem != self._node and _is_alive(path) and (peer := _read_peer(path))
        ]

    def _announce(self, is_done: bool) -> None:
        record = {
            "addresses": self._swarm.addresses,
            "port": self._swarm.port,
            "has": sorted(self._has),
            "fetches": sorted(self._downloads),
            "is_done": is_done,
        }
        if record != self._record:
            write_json(self._record_path, record)
            self._record = record
        else:
            os.utime(self._record_path)

    def _leave(self) -> None:
        self._record_path.unlink(missing_ok=True)
        for content in self._claimed:
            self._claim_path(content).unlink(missing_ok=True)

    def _claim(self, content: str) -> bool:
        """Take it upon this node to read a file from its origin; False where somebody alive has done so."""
        path = self._claim_path(content)
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self._node)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                claimant = path.read_text(encoding="utf-8")
                record = self._meeting / f"{claimant}.json"
                if claimant == self._node or not (_is_alive(path) or _is_alive(record)):
                    path.unlink()
            return False
        # It stays ours when the file is here: others may not know yet that it is.
        self._claimed.add(content)
        return True

    @property
    def _record_path(self) -> Path:
        return self._meeting / f"{self._node}.json"

    def _claim_path(self, content: str) -> Path:
        return self._meeting / f"{content}.claim"

    def _torrent(self, content: str) -> Path:
        return self._meeting / f"{content}.torrent"


def _by_content(tasks: Sequence[CopyTask]) -> dict[str, list[CopyTask]]:
    grouped: dict[str, list[CopyTask]] = {}
    for task in tasks:
        grouped.setdefault(task.record.xxh3_128, []).append(task)
    return grouped


def _shuffled(tasks: dict[str, list[CopyTask]], node: str) -> list[tuple[str, list[CopyTask]]]:
    """Return the files in an order of the node's own, so that nodes claim different ones."""
    items = sorted(tasks.items())
    random.Random(node).shuffle(items)
    return items


def _finished(futures: dict[str, Future]) -> Iterator[str]:
    yield from [content for content, future in futures.items() if future.done()]


def _is_alive(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime < DEAD_SECONDS
    return False


def _read_peer(path: Path) -> Peer | None:
    with contextlib.suppress(FileNotFoundError):
        row = json.loads(path.read_text(encoding="utf-8"))
        lists = tuple(row["addresses"]), row["port"], frozenset(row["has"]), frozenset(row["fetches"])
        return Peer(*lists, row["is_done"])
    return None

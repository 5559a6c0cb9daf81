"""Copies files to many nodes at once: shared storage is read once, and the nodes pass the files on to one another.

The first node that claims a file reads it from its origin. Once the file is on that node's disk with the correct hash,
the node publishes a torrent; the others fetch it by BitTorrent (libtorrent) from every node that has pieces of it. No
node is special: another node claims the files of one that dies, a late node fetches existing files, and a node without
peers reads the origin.

The nodes meet in a folder on shared storage (`peer_registry`). SLURM's `sbcast` copies whole files within one
allocation and restarts after a kill; aria2 accepts no list of peers and would need a tracker.

A fetched file is accepted once its own full hash matches and it is synced. Pieces that a killed node had fetched are
reused by its next attempt: BitTorrent checks each piece.
"""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from posttrain.checkpoint.staging.file_placement import TransferProgress, publish_link
from posttrain.checkpoint.staging.node_local import Copier, CopyTask
from posttrain.checkpoint.staging.peer_registry import Peer, PeerRegistry
from posttrain.checkpoint.staging.swarm import Swarm
from posttrain.report.progress import ProgressBar
from posttrain.store import hash_file

log = logging.getLogger(__name__)

# Short compared with the copy of a file, which takes seconds; a poll lists one folder.
POLL_SECONDS = 0.25
# A download without progress for this long is cancelled, and the origin is read.
STALL_SECONDS = 60.0
# With two reads, one continues while the other is hashed; downloads share the peers' links and profit from more.
MAX_READS, MAX_DOWNLOADS = 2, 16
# All nodes together read at most this share of the files from their origins at a time: only a file that has been
# read can be passed on.
READ_SHARE = 1 / 8
SCRATCH = ".broadcast"


class Broadcast:
    """One node of a broadcast.

    Args:
        peers: Folder on shared storage; equal on all nodes that copy the same files.
        node: This node's name.
        destination: Folder on this node's local disk; incomplete files are in a hidden folder in it.
        interface: Network interface of the nodes; empty means all networks.
    """

    def __init__(self, peers: Path, node: str, destination: Path, interface: str = ""):
        self._peers, self._node, self._interface = peers, node, interface
        self._scratch = destination / SCRATCH

    def fetch(self, wrong: Sequence[CopyTask], right: Sequence[CopyTask]) -> None:
        """Copy the files of `wrong` to this node; serve them and the files of `right` while peers need them.

        Args:
            wrong: Files that are missing here or have other bytes.
            right: Files that are correct here.

        Raises:
            CheckpointError: An origin's file does not match its receipt.
            OSError: The disk is full.
        """
        self._scratch.mkdir(parents=True, exist_ok=True)
        total = sum(task.record.size_bytes for task in wrong)
        with (
            ProgressBar(f"copy to {self._scratch.parent}", total) as bar,
            Swarm(self._scratch, self._interface) as swarm,
            ThreadPoolExecutor(MAX_READS + 1) as pool,
        ):
            exchange = _Exchange(PeerRegistry(self._peers, self._node), swarm, pool, TransferProgress(bar))
            exchange.run(_by_content(wrong), _by_content(right))
        shutil.rmtree(self._scratch)


class _Exchange:
    """The state of one `fetch`."""

    def __init__(self, registry: PeerRegistry, swarm: Swarm, pool: ThreadPoolExecutor, progress: TransferProgress):
        self._registry, self._swarm, self._pool, self._progress = registry, swarm, pool, progress
        self._has: set[str] = set()
        # Files in progress: read from the origin, fetched from peers, verified after the fetch.
        self._reads: dict[str, Future[None]] = {}
        self._downloads: dict[str, float] = {}
        self._checks: dict[str, Future[bool]] = {}
        self._unreachable: set[str] = set()

    def run(self, wrong: dict[str, list[CopyTask]], right: dict[str, list[CopyTask]]) -> None:
        """Run until this node has every file, then until all live nodes have theirs."""
        missing = _shuffled(wrong)
        max_reads = max(2, int(READ_SHARE * (len(wrong) + len(right))))
        for content, tasks in right.items():
            for twin in missing.pop(content, ()):
                publish_link(tasks[0].target, twin.target)
                self._progress.advance(twin.record.size_bytes)
            self._offer(content, tasks[0])
        try:
            self._registry.refresh()
            while missing or not all(peer.is_done for peer in self._registry.peers):
                self._collect(missing)
                for content, tasks in missing.items():
                    if not self._is_under_way(content):
                        self._begin(content, tasks[0], max_reads)
                self._tend_downloads()
                self._say(is_done=not missing)
                time.sleep(POLL_SECONDS)
                self._registry.refresh()
        except BaseException:
            self._progress.stop()
            raise
        finally:
            self._registry.leave()

    # ---- one file ----

    def _is_under_way(self, content: str) -> bool:
        return content in self._reads or content in self._downloads or content in self._checks

    def _begin(self, content: str, task: CopyTask, max_reads: int) -> None:
        """Fetch a file from peers, or read it from its origin if no other node does."""
        if content in self._unreachable:
            if len(self._reads) < MAX_READS:
                self._reads[content] = self._pool.submit(self._read, content, task)
        elif self._registry.has_torrent(content) and any(content in peer.has for peer in self._registry.peers):
            if len(self._downloads) < MAX_DOWNLOADS:
                self._swarm.download(content, self._registry.torrent(content))
                self._downloads[content] = time.monotonic()
        elif len(self._reads) < MAX_READS and self._num_reads() < max_reads:
            # Other nodes may have claimed it since the last refresh.
            self._registry.refresh()
            if self._num_reads() < max_reads and self._registry.claim(content):
                self._reads[content] = self._pool.submit(self._read, content, task)

    def _num_reads(self) -> int:
        return len((self._registry.being_read() | self._reads.keys()) - self._has)

    def _read(self, content: str, task: CopyTask) -> None:
        Copier().make(task, task.target.parent, self._progress)
        self._swarm.make_torrent(content, task.target, self._registry.torrent(content))

    def _offer(self, content: str, task: CopyTask) -> None:
        """Offer a correct local file to the peers."""
        if not self._registry.has_torrent(content):
            self._swarm.make_torrent(content, task.target, self._registry.torrent(content))
        self._swarm.seed(content, task.target, self._registry.torrent(content))
        self._has.add(content)

    def _collect(self, missing: dict[str, list[CopyTask]]) -> None:
        """Process finished reads, downloads and checks."""
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
        """Publish a fetched file under its name if its bytes are correct."""
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

    def _tend_downloads(self) -> None:
        """Connect downloads to the peers that have the file; cancel those that have stalled or lost their peers."""
        for content, since in list(self._downloads.items()):
            useful = [peer for peer in self._registry.peers if content in peer.has or content in peer.fetches]
            self._swarm.connect(content, [(host, peer.port) for peer in useful for host in peer.addresses])
            if self._swarm.has_progressed(content):
                self._downloads[content] = time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                log.warning("%s does not come from its peers; it is read from its origin", content)
                self._give_up(content)
            elif not any(content in peer.has for peer in useful):
                # The peers that had it are gone; a node will claim it again.
                self._swarm.drop(content)
                del self._downloads[content]

    def _give_up(self, content: str) -> None:
        self._swarm.drop(content)
        self._downloads.pop(content, None)
        self._unreachable.add(content)

    def _say(self, is_done: bool) -> None:
        swarm, files = self._swarm, (sorted(self._has), sorted(self._reads), sorted(self._downloads))
        self._registry.say(Peer(swarm.addresses, swarm.port, *files, is_done))


def _by_content(tasks: Sequence[CopyTask]) -> dict[str, list[CopyTask]]:
    grouped: dict[str, list[CopyTask]] = {}
    for task in tasks:
        grouped.setdefault(task.record.xxh3_128, []).append(task)
    return grouped


def _shuffled(tasks: dict[str, list[CopyTask]]) -> dict[str, list[CopyTask]]:
    """Return the files in a random order, so that nodes claim different ones."""
    items = list(tasks.items())
    random.shuffle(items)
    return dict(items)


def _finished(futures: dict[str, Future]) -> Iterator[str]:
    yield from [content for content, future in futures.items() if future.done()]

"""BitTorrent among nodes that trust each other; the only module that imports libtorrent.

Each file has one torrent, named after its content. There is no tracker, distributed hash table or discovery: the
caller provides the peers. Files are in one folder, named by the hashes of their content.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import libtorrent
import psutil

from posttrain.errors import CheckpointError
from posttrain.store import write_atomic

# Pieces come from different peers: a small file needs several, a large one not too many.
PIECES_PER_FILE, MIN_PIECE_BYTES, MAX_PIECE_BYTES = 256, 1 << 16, 1 << 23
# Peers per file: with this many, a few hops connect any two nodes.
MAX_CONNECTIONS = 16
# libtorrent's constant for "no encryption".
_PLAIN_PROTOCOL = 2
SETTINGS: dict[str, Any] = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    # The cluster's own network needs plain TCP, service for every peer at once, and quick retries.
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "out_enc_policy": _PLAIN_PROTOCOL,
    "in_enc_policy": _PLAIN_PROTOCOL,
    "allow_multiple_connections_per_ip": True,
    "unchoke_slots_limit": -1,
    "connections_limit": 2000,
    "min_reconnect_time": 1,
    "connection_speed": 100,
    "alert_mask": libtorrent.alert.category_t.storage_notification,
}


class Swarm:
    """This node's BitTorrent session; a context manager.

    Args:
        folder: Folder of the files, each named by the hash of its content.
        interface: Network interface of the nodes; empty means all networks.
    """

    def __init__(self, folder: Path, interface: str = ""):
        self._folder, self._interface = folder, interface
        self._handles: dict[str, Any] = {}
        self._connected: dict[str, set[tuple[str, int]]] = {}
        self._seen_bytes: dict[str, int] = {}
        self._flushing: set[str] = set()
        self._flushed: set[str] = set()

    def __enter__(self) -> Swarm:
        # With port 0, libtorrent would choose a different port on each network.
        port = _free_port()
        places = ",".join(f"{address}:{port}" for address in self.addresses)
        self._session = libtorrent.session({**SETTINGS, "listen_interfaces": places})  # type: ignore[call-overload]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The destructor waits for the disk.
        self._handles.clear()
        del self._session

    @property
    def port(self) -> int:
        """The port that this node listens on."""
        return self._session.listen_port()

    @property
    def addresses(self) -> list[str]:
        """This machine's addresses that others can reach; loopback only without any other.

        Raises:
            RuntimeError: The interface has no IPv4 address.
        """
        known = psutil.net_if_addrs()
        rows = known.get(self._interface, []) if self._interface else itertools.chain(*known.values())
        found = [row.address for row in rows if row.family == socket.AF_INET]
        if not found:
            raise RuntimeError(f"no IPv4 address on {self._interface or 'any interface'}, only {', '.join(known)}")
        return [address for address in found if not address.startswith("127.")] or found

    def path(self, content: str) -> Path:
        """Return the path of a file."""
        return self._folder / content

    def make_torrent(self, content: str, file: Path, torrent: Path) -> None:
        """Write the hashes of a file's pieces to `torrent`."""
        self._link(content, file)
        storage = libtorrent.file_storage()
        storage.add_file(content, file.stat().st_size)
        made = libtorrent.create_torrent(storage, _piece_bytes(file.stat().st_size), libtorrent.create_torrent.v1_only)
        libtorrent.set_piece_hashes(made, str(self._folder))
        encoded = libtorrent.bencode(made.generate())
        write_atomic(torrent, lambda file: file.write(encoded))

    def seed(self, content: str, file: Path, torrent: Path) -> None:
        """Serve a correct file to the peers."""
        if content not in self._handles:
            self._link(content, file)
            self._add(content, torrent, libtorrent.torrent_flags.seed_mode)

    def download(self, content: str, torrent: Path) -> None:
        """Fetch a file or its remainder."""
        # Never write through a link to an existing copy.
        if self.path(content).exists() and self.path(content).stat().st_nlink > 1:
            self.path(content).unlink()
        self._add(content, torrent, 0)

    def connect(self, content: str, peers: Sequence[tuple[str, int]]) -> None:
        """Add peers to a download, up to a limit."""
        known = self._connected[content]
        for peer in peers:
            if peer not in known and len(known) < MAX_CONNECTIONS:
                self._handles[content].connect_peer(peer)
                known.add(peer)

    def has_progressed(self, content: str) -> bool:
        """Return whether a download has more bytes than at the last call.

        Raises:
            OSError: The file cannot be written.
        """
        status = self._handles[content].status()
        if status.errc.value():
            raise OSError(status.errc.value(), status.errc.message(), str(self.path(content)))
        before, self._seen_bytes[content] = self._seen_bytes.get(content, 0), status.total_done
        return status.total_done > before

    def is_complete(self, content: str) -> bool:
        """Return whether all pieces of a download are complete and flushed; poll until True."""
        # libtorrent counts a verified piece possibly before its bytes are in the file.
        if content not in self._flushing and self._handles[content].status().is_seeding:
            self._handles[content].flush_cache()
            self._flushing.add(content)
        for alert in self._session.pop_alerts():
            if isinstance(alert, libtorrent.cache_flushed_alert):
                self._flushed.add(alert.torrent_name)
        return content in self._flushing & self._flushed

    def drop(self, content: str) -> None:
        """Cancel a download; its pieces are kept for the next one."""
        self._flushing.discard(content)
        self._flushed.discard(content)
        self._session.remove_torrent(self._handles.pop(content))

    def _add(self, content: str, torrent: Path, flags: int) -> None:
        wanted = libtorrent.add_torrent_params()
        wanted.ti = libtorrent.torrent_info(str(torrent))
        if (wanted.ti.num_files(), wanted.ti.name()) != (1, content):
            raise CheckpointError(
                "torrent-of-other-files", f"{torrent}: of other files than {content}; delete it and run again"
            )
        wanted.save_path = str(self._folder)
        wanted.flags = libtorrent.torrent_flags.default_flags | flags
        wanted.flags &= ~(libtorrent.torrent_flags.paused | libtorrent.torrent_flags.auto_managed)
        self._handles[content] = self._session.add_torrent(wanted)
        self._connected[content] = set()

    def _link(self, content: str, file: Path) -> None:
        path = self.path(content)
        if not (path.exists() and path.samefile(file)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.link(file, path)


def _piece_bytes(size_bytes: int) -> int:
    wanted = 1 << max(0, (size_bytes // PIECES_PER_FILE).bit_length())
    return min(max(wanted, MIN_PIECE_BYTES), MAX_PIECE_BYTES)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])

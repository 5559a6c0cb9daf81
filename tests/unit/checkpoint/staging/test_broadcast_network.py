"""Nodes whose links are limited, each with a network of its own: shared storage is read once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks import broadcast
from tests.support.network_nodes import limited_hosts, mounted, require_network

from posttrain.checkpoint.staging.peer_registry import PeerRegistry


def test_shared_storage_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_network()
    monkeypatch.setattr(broadcast, "NUM_FILES", 12)
    monkeypatch.setattr(broadcast, "FILE_BYTES", 4 << 20)
    unique = broadcast.make_weights(tmp_path / "storage")
    with (
        limited_hosts(4, megabits=80) as (storage, *nodes),
        mounted(storage, tmp_path / "storage", nodes, tmp_path / "nodes") as places,
    ):
        before = storage.sent_bytes()
        broadcast.stage_all(tmp_path / "nodes", nodes, places, "broadcast")
        sent = storage.sent_bytes() - before
    assert unique <= sent <= 1.2 * unique  # the talk of nodes is a larger part of little


def test_one_node_gets_each_claim(tmp_path: Path) -> None:
    """Over a network a name that is there already is an error of another kind than on a local disk."""
    require_network()
    (tmp_path / "storage").mkdir()
    with (
        limited_hosts(4, megabits=80) as (storage, *nodes),
        mounted(storage, tmp_path / "storage", nodes, tmp_path / "nodes") as places,
        ThreadPoolExecutor(len(nodes)) as pool,
    ):
        registries = [PeerRegistry(place, node.name) for place, node in zip(places, nodes, strict=True)]
        for content in map(str, range(50)):
            claims = list(pool.map(lambda registry, content=content: registry.claim(content), registries))
            assert claims.count(True) == 1, content

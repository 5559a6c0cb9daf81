"""Nodes are processes here, and their network is the machine's own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from posttrain.checkpoint.staging.peer_registry import DEAD_SECONDS
from posttrain.checkpoint.staging.swarm import Swarm
from posttrain.store import FORMAT_VERSIONS, Receipt, hash_file, record_files, write_receipt

NODE = """
import sys
from pathlib import Path
from posttrain.store import read_receipt
from posttrain.checkpoint.staging import broadcast, node_local
from posttrain.checkpoint.staging.broadcast import Broadcast
from posttrain.checkpoint.staging.node_local import StagedSource, stage

root, node = Path(sys.argv[1]), sys.argv[2]
make = node_local.Copier.make
def make_and_note(self, task, folder, progress):
    make(self, task, folder, progress)
    # One write: threads share the output.
    print(f"read {task.record.path}\\n", end="", flush=True)
node_local.Copier.make = make_and_note
origin = StagedSource(root / "weights", read_receipt(root / "receipt.json"))
stage([origin], root / node, fetch=Broadcast(root / "peers", node, root / node).fetch)
print("done", flush=True)
"""
NUM_FILES, FILE_BYTES = 8, 3_000_000


@pytest.fixture
def root(tmp_path):
    """A folder of files, two of them equal, with their receipt."""
    numbers = random.Random(0)
    (tmp_path / "weights" / "deep").mkdir(parents=True)
    for index in range(NUM_FILES):
        (tmp_path / "weights" / f"{index}.bin").write_bytes(numbers.randbytes(FILE_BYTES))
    (tmp_path / "weights" / "deep" / "twin.bin").write_bytes((tmp_path / "weights" / "0.bin").read_bytes())
    assert "finalize_torch_dist" in FORMAT_VERSIONS
    records = record_files(tmp_path / "weights")
    write_receipt(tmp_path / "receipt.json", Receipt("finalize_torch_dist", records, {}, {}))
    return tmp_path


def start(root: Path, node: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", NODE, root, node], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen) -> list[str]:
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    return [line.split()[1] for line in output.splitlines() if line.startswith("read")]


def test_each_file_is_read_once_and_every_node_gets_all(root):
    nodes = [f"node{index}" for index in range(3)]
    read = [name for process in [start(root, node) for node in nodes] for name in end(process)]
    assert len(read) == NUM_FILES == len(set(read))
    for node in nodes:
        assert record_files(root / node / "weights") == record_files(root / "weights")
        assert sorted(path.name for path in (root / node).iterdir()) == ["weights", "weights.testimony.json"]
    assert {path.suffix for path in (root / "peers").iterdir()} == {".torrent"}


def test_killed_nodes_take_nothing_with_them(root):
    """One is killed for good, one comes back; a third has to do with what there is."""
    for node in ("gone", "back"):
        process = start(root, node)
        assert process.stdout.readline().startswith("read")
        process.send_signal(signal.SIGKILL)
        process.wait()
        # As if it had been silent for long.
        for path in (*(root / "peers").glob("*.claim"), *(root / "peers").glob("*.json")):
            os.utime(path, (1, time.time() - DEAD_SECONDS))
    processes = [start(root, "back"), start(root, "third")]
    for process in processes:
        end(process)
    for node in ("back", "third"):
        assert record_files(root / node / "weights") == record_files(root / "weights")


def test_a_peer_with_other_bytes_is_not_believed(root):
    """Somebody's torrent says 0.bin, and holds something else of the same length."""
    content, other = hash_file(root / "weights" / "0.bin"), root / "other.bin"
    other.write_bytes(bytes(FILE_BYTES))
    (root / "peers").mkdir()
    (root / "liar").mkdir()
    with Swarm(root / "liar") as swarm:
        swarm.make_torrent(content, other, root / "peers" / f"{content}.torrent")
        swarm.seed(content, other, root / "peers" / f"{content}.torrent")
        row = {"addresses": swarm.addresses, "port": swarm.port, "has": [content], "reads": [], "fetches": []}
        (root / "peers" / "liar.json").write_text(json.dumps(row | {"is_done": True}))
        read = end(start(root, "node0"))
    assert any(name in read for name in ("0.bin", "deep/twin.bin"))
    assert record_files(root / "node0" / "weights") == record_files(root / "weights")


def test_a_source_that_differs_from_its_receipt_is_refused(root):
    (root / "weights" / "3.bin").write_bytes(bytes(FILE_BYTES))
    process = start(root, "node0")
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (root / "node0" / "weights" / "3.bin").exists()
    assert not list((root / "peers").glob("*.json"))


def test_a_node_listens_on_the_network_of_the_others_alone(tmp_path):
    def listening(swarm):
        port = swarm.port  # asked first, it waits until the session listens
        return {at.laddr.ip for at in psutil.Process().net_connections("inet") if at.laddr.port == port}

    with Swarm(tmp_path, "lo") as swarm:
        assert listening(swarm) == set(swarm.addresses) == {"127.0.0.1"}
    with Swarm(tmp_path) as swarm:
        assert listening(swarm) == set(swarm.addresses), "each by itself, and not 0.0.0.0"
    with pytest.raises(RuntimeError, match="no IPv4 address on nonesuch0"), Swarm(tmp_path, "nonesuch0"):
        pass

"""Two claims about copying the same weights from shared storage to 8 nodes with `stage.broadcast=bittorrent`.

Shared storage sends at most 1.1 times the unique bytes, and all nodes have them, verified and synced, after at most 1.5
times what one node alone needs for `cp -r`. Beside it: every node reads for itself.

The nodes are network namespaces with limited links, shared storage is one more, mounted by SFTP
(`tests.support.network_nodes`). Bytes are what leaves its link, headers and the nodes' talk in the folder of peers
included. Run as root from the repository's root, after `make env-network`:

    python -m benchmarks.broadcast
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.claims import MissingEnvironment, report, start
from tests.support.network_nodes import Host, limited_hosts, missing_network, mounted

from posttrain.store import Receipt, record_files, write_receipt

NODES, MEGABITS, NUM_FILES, FILE_BYTES, REPEATS = 8, 80, 64, 8 << 20, 3
READ_GOAL, TIME_GOAL = 1.1, 1.5
STAGE = """
import sys, time
from pathlib import Path
from posttrain.store import read_receipt
from posttrain.checkpoint.staging.broadcast import Broadcast
from posttrain.checkpoint.staging.node_local import StagedSource, stage
shared, node, name, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
node.mkdir(parents=True)
(node / "ready").touch()
while not (node.parent / "go").exists():
    time.sleep(0.05)
origin = StagedSource(shared / "weights", read_receipt(shared / "receipt.json"))
fetch = Broadcast(shared / "peers", name, node).fetch if way == "broadcast" else None
stage([origin], node, fetch=fetch)
"""


def main() -> None:
    """Measure, print the table and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    compare(NODES, NUM_FILES, FILE_BYTES, parser.parse_args().repeats)


def quick() -> None:
    """Two nodes and two small files, once."""
    compare(2, 2, 1 << 18, 1)


def compare(num_nodes: int, num_files: int, file_bytes: int, repeats: int) -> None:
    """Measure, print the table and a line of JSON for each claim."""
    if reason := missing_network():
        raise MissingEnvironment(reason)
    with tempfile.TemporaryDirectory(prefix="broadcast-") as folder, limited_hosts(num_nodes + 1, MEGABITS) as hosts:
        unique = make_weights(Path(folder) / "storage", num_files, file_bytes)
        rows = measure(Path(folder), hosts, repeats)
    print(f"{num_nodes} nodes, {unique / 1e6:.0f} MB in {num_files} files, links of {MEGABITS} Mbit/s")
    print(f"{'way':24} {'median s':>9} {'read, times the unique bytes':>30}")
    medians = {}
    for way, found in rows.items():
        medians[way] = [statistics.median(column) for column in zip(*found, strict=True)]
        print(f"{way:24} {medians[way][0]:9.1f} {medians[way][1] / unique:30.2f}")
    what = f"broadcast to {num_nodes} nodes"
    report(f"{what}: shared storage is read at most 1.1 times", medians["broadcast"][1] / unique, READ_GOAL)
    report(
        f"{what}: takes at most 1.5 times what one node needs for cp -r",
        medians["broadcast"][0] / medians["cp -r"][0],
        TIME_GOAL,
    )


def make_weights(storage: Path, num_files: int, file_bytes: int) -> int:
    """Write the files and their receipt; return their bytes."""
    numbers = random.Random(0)
    (storage / "weights").mkdir(parents=True)
    for index in range(num_files):
        (storage / "weights" / f"{index:03d}.bin").write_bytes(numbers.randbytes(file_bytes))
    receipt = Receipt("finalize_torch_dist", record_files(storage / "weights"), {}, {})
    write_receipt(storage / "receipt.json", receipt)
    return receipt.size_bytes


def measure(folder: Path, hosts: Sequence[Host], repeats: int) -> dict[str, list[tuple[float, int]]]:
    """Return way -> (seconds, bytes that shared storage sent) of each repeat, interleaved."""
    storage, *nodes = hosts
    ways: dict[str, Callable[[Path, Sequence[Path]], float]] = {
        "cp -r": lambda target, places: copy_alone(target, nodes[0], places[0]),
        "broadcast": lambda target, places: stage_all(target, nodes, places, "broadcast"),
        "each node for itself": lambda target, places: stage_all(target, nodes, places, "alone"),
    }
    rows: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way, work in ways.items():
            # The slow way shows itself once.
            if way == "each node for itself" and repeat:
                continue
            target = folder / f"{way}-{repeat}"
            shutil.rmtree(folder / "storage" / "peers", ignore_errors=True)
            with mounted(storage, folder / "storage", nodes, target) as places:
                before = storage.sent_bytes()
                seconds = work(target, places)
                rows[way].append((seconds, storage.sent_bytes() - before))
            shutil.rmtree(target)
    return rows


def copy_alone(target: Path, node: Host, shared: Path) -> float:
    """Return the seconds of `cp -r` on one node, synced."""
    started = time.perf_counter()
    copy = node.start("sh", "-c", f"cp -r '{shared}/weights' '{target}/copy' && sync -f '{target}'")
    assert copy.wait() == 0
    return time.perf_counter() - started


def stage_all(target: Path, nodes: Sequence[Host], places: Sequence[Path], way: str) -> float:
    """Return the seconds until every node has all; starting Python is not counted."""
    folders = [target / node.name for node in nodes]
    arguments = [(place, folder, node.name, way) for place, folder, node in zip(places, folders, nodes, strict=True)]
    processes = [node.start(sys.executable, "-c", STAGE, *words) for node, words in zip(nodes, arguments, strict=True)]
    while not all((folder / "ready").exists() for folder in folders):
        time.sleep(0.05)
    started = time.perf_counter()
    (target / "go").touch()
    assert [process.wait() for process in processes] == [0] * len(nodes)
    seconds = time.perf_counter() - started
    expected = record_files(target.parent / "storage" / "weights")
    assert all(record_files(folder / "weights") == expected for folder in folders)
    return seconds


if __name__ == "__main__":
    start(main, quick)

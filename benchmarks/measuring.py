"""What benchmarks share: checkpoints of GLM-5's true shapes, work in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.formats.shard_writer import TORCH_DTYPES, HashingFile, assign_shards, write_index, write_shard
from posttrain.store import partial_of
from posttrain.store.durable import sync_tree

# So many rows of a tensor are random; a larger one repeats them.
RANDOM_ROWS = 2048


# ---- the source ----


def write_checkpoint(folder: Path, specs: Mapping[str, TensorSpec], shard_bytes: int) -> None:
    """Write random tensors as a checkpoint in Hub layout, on the disk when this returns."""
    folder.mkdir(parents=True)
    shards = assign_shards({name: spec.size_bytes for name, spec in specs.items()}, shard_bytes)
    for file, names in shards.items():
        with open(folder / file, "wb") as opened, HashingFile(opened) as output:
            write_shard(output, {name: specs[name] for name in names}, lambda name: _random(specs[name]))
    write_index(folder, {name: file for file, names in shards.items() for name in names}, specs)
    sync_tree(folder)


def _random(spec: TensorSpec) -> torch.Tensor:
    rows = spec.shape[0]
    some = torch.randn((min(rows, RANDOM_ROWS), *spec.shape[1:])).mul_(0.02).to(TORCH_DTYPES[spec.dtype])
    return some.repeat(-(-rows // len(some)), *[1] * (some.dim() - 1))[:rows]


# ---- the work ----


def copy_and_hash(source: Path, result: Path) -> float:
    """Copy a folder with `cp`, synced, and take one SHA-256 of its shards; return the seconds."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, result], check=True)
    sync_tree(result)
    for path in sorted(source.glob("*.safetensors")):
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")
    return time.perf_counter() - started


def run_work(module: str, source: Path, result: Path, *arguments: object) -> tuple[float, float]:
    """Run one piece of a benchmark's work in a process, its source not in memory, and delete what it made.

    Args:
        module: The benchmark; its last line of output is the seconds, as JSON.
        source: Checkpoint to read.
        result: Where it writes.
        arguments: What else stands on its command line.

    Returns:
        Its own seconds, and the peak of its anonymous memory (RssAnon) in GiB.
    """
    for path in source.iterdir():
        _drop_from_memory(path)
    command = [sys.executable, "-W", "ignore", "-m", module, "--source", source, "--result", result, *arguments]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        peaks: list[float] = []
        watcher = threading.Thread(target=_watch_memory, args=(process.pid, peaks))
        watcher.start()
        output, _ = process.communicate()
        watcher.join()
    assert process.returncode == 0, command
    for made in (result, partial_of(result), result.with_name(f"{result.name}.parts")):
        shutil.rmtree(made, ignore_errors=True)
    return json.loads(output.splitlines()[-1]), max(peaks)


def _drop_from_memory(path: Path) -> None:
    """Let the system forget a file's pages; they are on the disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _watch_memory(pid: int, peaks: list[float]) -> None:
    """Note the anonymous memory of a process in GiB until it ends."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        anonymous = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
        if not anonymous:
            return
        peaks.append(anonymous[0] / (1 << 20))
        time.sleep(0.01)

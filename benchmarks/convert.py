"""Four claims about converting a checkpoint to Megatron's format, on tensors of GLM-5's true shapes, with 2 workers.

It takes at most 1.5 times as long as `cp` of the source plus one SHA-256 of it; it is at least 5 times faster than
building Megatron's model in host memory, filling and saving it, with less than a tenth of that one's anonymous memory;
and with the embedding and a whole layer of 256 experts it stays below 2 GiB of anonymous memory.

Sources are read from the disk (their pages are dropped before each run), results are on it (fsync), the runs are
interleaved and the median counts. Starting Python and importing is not counted. Needs about 12 GB of disk, and 30 GB
for the whole layer, and removes what it wrote. Run from the repository's root:

    python -m benchmarks.convert [--folder FOLDER] [--repeats 5] [--experts 52] [--layer-experts 256]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims import report, start
from benchmarks.measuring import copy_and_hash, run_work, write_checkpoint
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.torch_dist import Conversion
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve
from posttrain.store import building
from posttrain.store.durable import sync_tree

COPY_GOAL, BUILD_GOAL, BUILD_MEMORY_GOAL, MEMORY_GOAL_GIB = 1.5, 5.0, 0.1, 2.0
WORKERS = 2
SHARD_BYTES = FILE_BYTES = 10**9


def main() -> None:
    """Make the sources, run everything, print the table and a line of JSON for each claim."""
    args = parse_arguments()
    if args.work:
        print(json.dumps(WORK[args.work](args.source, args.result, one_layer(args.experts, args.vocabulary))))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds, memory = measure(Path(folder), args.experts, args.repeats)
        full_layer = measure_full_layer(Path(folder), args.layer_experts)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        times = " ".join(f"{value:.2f}" for value in seconds[name])
        print(f"{name:10} {median:8.2f} s {max(memory[name]):7.2f} GiB   {times}")
    ratio, faster = medians["ours"] / medians["copy"], medians["megatron"] / medians["ours"]
    share = max(memory["ours"]) / min(memory["megatron"])
    what = f"converting with {WORKERS} workers"
    report(f"{what}: times of cp plus SHA-256", ratio, COPY_GOAL)
    report(f"{what}: times faster than building the model and saving it", faster, BUILD_GOAL, at_least=True)
    report(f"{what}: share of that one's memory", share, BUILD_MEMORY_GOAL)
    layer = f"{what}: GiB of anonymous memory, embedding and {args.layer_experts} experts"
    report(layer, full_layer, MEMORY_GOAL_GIB)


def quick() -> None:
    """Every side once, in this process, on a model of a few kilobytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "source", expected_tensors(TINY), 1 << 16)
        for work, function in WORK.items():
            report(f"{work}: seconds", function(folder / "source", folder / work, TINY), 60.0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--experts", type=int, default=52, help="of the source whose time counts, 75 MB each")
    parser.add_argument("--layer-experts", type=int, default=256, help="of the source whose memory counts")
    parser.add_argument("--vocabulary", type=int, default=1024, help=argparse.SUPPRESS)
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the source ----


def one_layer(num_experts: int, vocabulary: int) -> Architecture:
    """Return GLM-5 with one MoE layer, of so many experts, and a vocabulary of so many words; else its dimensions."""
    glm5 = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture
    changes: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    return dataclasses.replace(glm5, **changes, n_routed_experts=num_experts, vocab_size=vocabulary)


# ---- the work: each runs in a process of its own and returns its seconds ----


def ours(source: Path, result: Path, arch: Architecture) -> float:
    """Convert as the workflow's two steps do, two files at a time."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    making = Conversion(source, "source", arch, FILE_BYTES)
    made = making.make(0, 1, result, WORKERS)
    with building(result) as partial:
        making.complete(partial, {item.record.path: item for item in made})
    return time.perf_counter() - started


def copy(source: Path, result: Path, arch: Architecture) -> float:
    """Copy the source, and hash it."""
    return copy_and_hash(source, result)


def megatron(source: Path, result: Path, arch: Architecture) -> float:
    """Build Megatron's model as Megatron does, initialised, fill it from the source and save it."""
    from megatron.core import dist_checkpointing
    from tests.support.hub_tensors import fill
    from tests.support.megatron_families import build_model
    from tests.support.megatron_single import initialize_single_rank, test_config

    from posttrain.rl.megatron_backend.weights import HubWeights

    config = test_config(arch)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, params_dtype="bf16"))
    initialize_single_rank(config)
    torch.set_num_threads(WORKERS)
    started = time.perf_counter()
    model = build_model(config, initialize=True)
    fill(HubWeights([model], arch), Tensors(CheckpointReader(source)))
    result.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(result))
    sync_tree(result)
    return time.perf_counter() - started


class Tensors(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors, each read when it is asked for."""

    def __init__(self, reader: CheckpointReader):
        self._reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader)

    def __len__(self) -> int:
        return len(list(self))


WORK: dict[str, Callable[[Path, Path, Architecture], float]] = {"ours": ours, "copy": copy, "megatron": megatron}


# ---- measuring ----


def measure(folder: Path, num_experts: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds and peaks of anonymous memory (GiB) of each run, by what it did."""
    write_checkpoint(folder / "source", expected_tensors(one_layer(num_experts, 1024)), SHARD_BYTES)
    seconds: dict[str, list[float]] = {name: [] for name in WORK}
    memory: dict[str, list[float]] = {name: [] for name in WORK}
    for _ in range(repeats):
        for name in WORK:
            taken, peak = run(name, folder / "source", folder / "result", num_experts, 1024)
            seconds[name].append(taken)
            memory[name].append(peak)
    shutil.rmtree(folder / "source")
    return seconds, memory


def measure_full_layer(folder: Path, num_experts: int) -> float:
    """Return the peak of anonymous memory (GiB) with the true embedding and output matrix and many experts."""
    vocabulary = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture.vocab_size
    write_checkpoint(folder / "source", expected_tensors(one_layer(num_experts, vocabulary)), SHARD_BYTES)
    return run("ours", folder / "source", folder / "result", num_experts, vocabulary)[1]


def run(work: str, source: Path, result: Path, num_experts: int, vocabulary: int) -> tuple[float, float]:
    """Run one piece of work; return its seconds and peak RssAnon in GiB."""
    sizes = ("--experts", num_experts, "--vocabulary", vocabulary)
    return run_work("benchmarks.convert", source, result, "--work", work, *sizes)


if __name__ == "__main__":
    start(main, quick)

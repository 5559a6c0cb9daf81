"""Three claims about quantising to FP8, on tensors of GLM-5's true names and shapes, with 2 workers.

It takes at most 1.5 times as long as `cp` of the source plus one SHA-256 of it, at most a third of the plain formula
of torch on one thread, and less than 2 GiB of anonymous memory beside the largest tensors there are.

Sources are read from the disk (their pages are dropped before each run), results are on it (fsync), the runs are
interleaved and the median counts. Starting Python and importing torch, some seconds, is not counted: a part of the
real model takes minutes. Needs twice the gigabytes of the sources on one disk, and removes what it wrote. Run from
the repository's root:

    python -m benchmarks.quantize [--folder FOLDER] [--gigabytes 4] [--repeats 5] [--format fp8]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from benchmarks.claims import report, start
from benchmarks.measuring import copy_and_hash, run_work, write_checkpoint
from safetensors.torch import save_file

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.checkpoint.quantization.quantized_names import Selection
from posttrain.plan.resolve import resolve
from posttrain.store import partial_of
from posttrain.store.durable import sync_tree

COPY_GOAL, FORMULA_GOAL, MEMORY_GOAL_GIB = 1.5, 3.0, 2.0
WORKERS = 2
SHARD_BYTES = 5 * 10**8
# For the quick form: one that is quantised and one that is not.
SMALL_NAMES = ["model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.input_layernorm.weight"]
SETTINGS = {
    "fp8": {"format": "fp8", "strategy": "block", "scale": "fp32"},
    "nvfp4": {"format": "nvfp4"},
}


def main() -> None:
    """Make the sources, run everything, print the table and a line of JSON for each claim."""
    args = parse_arguments()
    if args.work:
        print(json.dumps(WORK[args.work](args.source, args.result, args.format)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds, memory = measure(Path(folder), args.gigabytes, args.repeats, args.format)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:10} {median:8.2f} s   {' '.join(f'{value:.2f}' for value in seconds[name])}")
    what = f"quantising {args.gigabytes} GB to {args.format} with {WORKERS} workers"
    ratio = medians["ours"] / medians["copy"]
    report(f"{what}: times of cp plus SHA-256", ratio, COPY_GOAL)
    if args.format == "fp8":
        faster = medians["formula"] / medians["ours"]
        report(f"{what}: times faster than torch's formula on one thread", faster, FORMULA_GOAL, at_least=True)
    report(f"{what}: GiB of anonymous memory, embedding included", memory, MEMORY_GOAL_GIB)


def quick() -> None:
    """Every side once, in this process, on two small tensors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_source(folder / "source", SMALL_NAMES, 1e9)
        for work, function in WORK.items():
            report(f"{work}: seconds", function(folder / "source", folder / work, "fp8"), 60.0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written")
    parser.add_argument("--gigabytes", type=float, default=4.2, help="of the source whose time counts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--format", choices=SETTINGS, default="fp8")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the source ----


def make_source(folder: Path, names: Iterable[str], max_bytes: float) -> None:
    """Write tensors of the full model under their names, random ones, until there are enough bytes."""
    architecture = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture
    specs = expected_tensors(architecture)
    held: dict[str, TensorSpec] = {}
    for name in names:
        if sum(spec.size_bytes for spec in held.values()) < max_bytes:
            held[name] = specs[name]
    write_checkpoint(folder, held, SHARD_BYTES)
    (folder / "config.json").write_text('{"num_hidden_layers": 78}')


def layer_names(layer: int) -> list[str]:
    """Return the tensors of a layer with experts, attention first."""
    architecture = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture
    names = [name for name in expected_tensors(architecture) if name.startswith(f"model.layers.{layer}.")]
    return sorted(names, key=lambda name: ".experts." in name)


# ---- the work: each runs in a process of its own and returns its seconds ----


def ours(source: Path, result: Path, number_format: str) -> float:
    """Quantise as the workflow's two steps do."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    making = RecodedFolder(Quantization(source, SETTINGS[number_format]), "source")
    made = making.make(0, 1, result, WORKERS)
    making.complete(partial_of(result), {item.record.path: item for item in made})
    sync_tree(partial_of(result))
    return time.perf_counter() - started


def formula(source: Path, result: Path, number_format: str) -> float:
    """Quantise in blocks by the formula, tensor by tensor, on one thread."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    reader = CheckpointReader(source)
    result.mkdir()
    for file in reader.index.files:
        made: dict[str, torch.Tensor] = {}
        for name in (name for name in reader if reader.file_of(name) == file):
            made |= _by_formula(name, reader.tensor(name))
        save_file(made, result / file)
    sync_tree(result)
    return time.perf_counter() - started


def _by_formula(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not Selection().includes(name, weight.shape):
        return {name: weight}
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
    return {name: codes.contiguous(), f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}


def copy(source: Path, result: Path, number_format: str) -> float:
    """Copy the source, and hash it."""
    return copy_and_hash(source, result)


WORK = {"ours": ours, "copy": copy, "formula": formula}


# ---- measuring ----


def measure(folder: Path, gigabytes: float, repeats: int, number_format: str) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each run by what it did, and the largest anonymous memory of ours in GiB."""
    make_source(folder / "layer", layer_names(3), gigabytes * 1e9)
    works = ["ours", "copy", *(["formula"] if number_format == "fp8" else [])]
    seconds: dict[str, list[float]] = {name: [] for name in works}
    memory = []
    for _ in range(repeats):
        for name in works:
            taken, peak = run(name, folder / "layer", folder / "result", number_format)
            seconds[name].append(taken)
            memory += [peak] if name == "ours" else []
    shutil.rmtree(folder / "layer")
    make_source(folder / "large", ["model.embed_tokens.weight", *layer_names(3)], 3.2e9)
    memory.append(run("ours", folder / "large", folder / "result", number_format)[1])
    return seconds, max(memory)


def run(work: str, source: Path, result: Path, number_format: str) -> tuple[float, float]:
    """Run one piece of work; return its seconds and peak RssAnon in GiB."""
    return run_work("benchmarks.quantize", source, result, "--work", work, "--format", number_format)


if __name__ == "__main__":
    start(main, quick)

"""The trainer's steps on one GPU beside their plan, and the kernels that the plan has rates of.

    python -m benchmarks.one_gpu [--device cuda] [name ...]

Steps are those of `tests/support/gpu_ranks.py`: rows as full as the plan allows, made-up weights and tokens; of each
phase its seconds and its fullest memory. GLM-5 has two layers at full width here, one dense and one with 8 experts.
Alone are measured: a product, a copy, quantising, digests, the choice of keys and attention to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from benchmarks.claims import report, start
from tests.support.chosen_keys import reference_kernel
from tests.support.gpus import told_by_ranks
from torch.utils.benchmark import Timer

from posttrain.checkpoint.quantization.fp8 import quantize_block
from posttrain.rl.megatron_backend.glm5.choice import places_of_mask
from posttrain.rl.megatron_backend.glm5.fused_indexer import choose_in_kernels
from posttrain.rl.megatron_backend.glm5.sparse_attention import index_scores, select_topk
from posttrain.rl.megatron_backend.sparse_kernels import load_kernel
from posttrain_weights.digest import Digester, key_of

ONE_GPU = "hardware.gpus_per_node=1 engine.num_engines=1 engine.gpus_per_engine=1 trainer.deepep=false "
GLM5 = (
    "parallel.tensor_model_parallel_size=1 parallel.expert_model_parallel_size=1 "
    "model.architecture.num_hidden_layers=2 model.architecture.first_k_dense_replace=1 "
    "model.architecture.n_routed_experts=8 model.architecture.vocab_size=32768 "
)
STEPS: Mapping[str, dict[str, str]] = {
    "qwen3_0.6b, 16,384 tokens": {
        "model": "qwen3_0.6b",
        "set": "trainer.max_tokens_per_gpu=16384 rollout.max_response_tokens=8192",
    },
    "glm5, two layers, 16,384 tokens": {
        "model": "glm5_4layer",
        "set": f"{GLM5} trainer.max_tokens_per_gpu=16384 rollout.max_response_tokens=14000",
    },
}
# GLM-5's attention: latent and rotary part, keys kept, indexer's heads and their width.
LATENT, ROTARY, KEPT, INDEXERS, WIDTH, SCALE = 512, 64, 2048, 32, 128, 256**-0.5
GB, TERA = 1e9, 1e12


def main() -> None:
    """Print a table of each, and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only those that begin so; all of them if none is given")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for name, request in STEPS.items():
        if not arguments.names or name.startswith(tuple(arguments.names)):
            show_steps(name, request)
    if not arguments.names or "kernels" in arguments.names:
        for name, (value, unit) in kernels(torch.device(arguments.device), Sizes()).items():
            print(f"{name:60} {value:10.2f} {unit}", flush=True)


def quick() -> None:
    """The kernels on this machine's processor, on short rows."""
    sizes = Sizes(tokens=16, queries=4, kept=8, width=256, experts=1, seconds=0.0)
    for name, (value, unit) in kernels(torch.device("cpu"), sizes).items():
        print(f"{name:60} {value:10.4f} {unit}")


def show_steps(name: str, request: dict[str, str]) -> None:
    """Make the steps of a model in a process of its own, and print its phases."""
    asked = {**request, "site": "local", "hardware": "h100", "set": ONE_GPU + request["set"]}
    told: dict[str, Any] = told_by_ranks(1, work="steps", device="cuda", request=asked)
    asleep = told.pop("asleep")
    rate = 2 * asleep["moved_gib"] / asleep["seconds"]
    print(f"{name}\n{'phase':14}{'seconds':>9}{'plan':>9}{'GiB':>8}{'plan':>8}")
    print(f"{'asleep':14}{asleep['seconds']:9.3f}{'':9}{asleep['gib']:8.2f}{0:8.2f}   {rate:.1f} GiB/s by the host")
    for phase, row in told.items():
        planned = sum(row["planned_seconds"].values())
        sizes = f"{row['peak_gib']:8.2f}{row['planned_gib']:8.2f}"
        print(f"{phase:14}{row['seconds']:9.3f}{planned:9.3f}{sizes}")
        print("  ", json.dumps({cause: round(seconds, 3) for cause, seconds in row["planned_seconds"].items()}))
        if phase == "train":
            print(f"   MFU {row['mfu']:.3f}")
        report(f"{name}: seconds of {phase}, over the plan's", row["seconds"] / planned, 1.25)
        report(f"{name}: memory of {phase}, over the plan's", row["peak_gib"] / row["planned_gib"], 1.05)


@dataclass(frozen=True)
class Sizes:
    """Tokens of a row, queries and kept keys of attention, width of a product, experts digested together, seconds."""

    tokens: int = 8192
    queries: int = 1024
    kept: int = KEPT
    width: int = 8192
    experts: int = 32
    seconds: float = 0.5


def kernels(device: torch.device, sizes: Sizes) -> dict[str, tuple[float, str]]:
    """Return name -> rate and its unit, of one row."""

    def seconds(work: Callable[[], object]) -> float:
        return median_seconds(work, sizes.seconds)

    matrix = torch.randn(sizes.tokens, sizes.width, dtype=torch.bfloat16, device=device)
    square = torch.randn(sizes.width, sizes.width, dtype=torch.bfloat16, device=device)
    found = {"product in BF16": (2 * matrix.numel() * sizes.width / seconds(lambda: matrix @ square) / TERA, "TFLOPS")}
    copied = torch.empty_like(matrix)
    copy = seconds(lambda: copied.copy_(matrix))
    found["copy, read and written"] = (2 * matrix.nbytes / copy / GB, "GB/s")
    codes = seconds(lambda: quantize_block(matrix))
    found["FP8 by blocks of BF16"] = (matrix.nbytes / codes / GB, "GB/s")
    digester = Digester(key_of("secret", "1"), 8192, 2 * 8192, device)
    found["digests of BF16"] = (matrix.nbytes / seconds(lambda: digester.part(matrix)) / GB, "GB/s")
    experts = [torch.ones(2048, 6144, dtype=torch.int8, device=device) for _ in range(sizes.experts)]
    for name, digest in (
        ("one by one", lambda: [digester.part(e) for e in experts]),
        ("together", lambda: digester.parts(experts, [(0, 0)] * sizes.experts)),
    ):
        found[f"digests of experts' codes, {name}"] = (sum(e.nbytes for e in experts) / seconds(digest) / GB, "GB/s")
    return found | attention(device, sizes)


def attention(device: torch.device, sizes: Sizes) -> dict[str, tuple[float, str]]:
    """Return the rates of choosing keys for the last queries of a row, and of attending to them."""

    def seconds(work: Callable[[], object]) -> float:
        return median_seconds(work, sizes.seconds)

    num_tokens, num_queries = sizes.tokens, sizes.queries
    heads, found = 64, {}
    options: Any = {"dtype": torch.bfloat16, "device": device}
    keys, weights = torch.randn(1, num_tokens, WIDTH, **options), torch.randn(1, num_queries, INDEXERS, device=device)
    queries = torch.randn(1, num_queries, INDEXERS, WIDTH, **options)
    visible = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=device).tril(num_tokens - num_queries)
    scores = index_scores(queries, keys, weights)
    pairs = num_queries * num_tokens
    found["index scores"] = (pairs / seconds(lambda: index_scores(queries, keys, weights)) / GB, "pairs/ns")
    found["top-k of scores"] = (pairs / seconds(lambda: select_topk(scores, visible, sizes.kept)) / GB, "pairs/ns")
    keep = select_topk(scores, visible, sizes.kept)

    def choose() -> torch.Tensor:
        return places_of_mask(keep, sizes.kept, torch.int16)

    found["places of a mask"] = (pairs / seconds(choose) / GB, "pairs/ns")
    chosen = choose()[0].int()
    if device.type == "cuda":
        positions = torch.arange(num_tokens - num_queries, num_tokens, device=device)[None]

        def choose_fused() -> torch.Tensor:
            return choose_in_kernels(queries, weights, positions, keys, sizes.kept, torch.int16)

        found["index scores and places by kernels"] = (pairs / seconds(choose_fused) / GB, "pairs/ns")
    name = "tilelang" if device.type == "cuda" else "masked"
    kernel = load_kernel(cast(Any, SimpleNamespace(sparse_attention=name))) or reference_kernel
    query = torch.randn(num_queries, heads, LATENT + ROTARY, **options).requires_grad_()
    key = torch.randn(num_tokens, LATENT + ROTARY, **options).requires_grad_()

    def forward() -> torch.Tensor:
        return kernel(query, key, chosen, SCALE, LATENT)

    work = 2 * num_queries * heads * (2 * LATENT + ROTARY) * sizes.kept
    with torch.no_grad():
        alone = seconds(forward)
    gradient = torch.randn(num_queries, heads, LATENT, **options)
    both = seconds(lambda: forward().backward(gradient))
    found[f"attention to chosen keys ({name}), forward"] = (work / alone / TERA, "TFLOPS")
    found[f"attention to chosen keys ({name}), backward"] = (2.5 * work / (both - alone) / TERA, "TFLOPS")
    return found


def median_seconds(work: Callable[[], object], min_seconds: float) -> float:
    """Return the median time of a call, measured for so long, or once, after one that compiles."""
    work()
    if not min_seconds:
        return Timer("work()", globals={"work": work}).timeit(1).median
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=min_seconds).median


if __name__ == "__main__":
    start(main, quick)

"""Balance of data-parallel ranks: the most loaded one's work over the mean, of batches of 512 samples.

    python -m benchmarks.balance

Lengths are log-normal, as answers to mathematical problems have them. A sample's work is not the packer's formula: it
is what torch counts (`FlopCounterMode`) in the forward pass of transformers' Qwen3-4B at that length, whose attention
multiplies what a causal kernel does: a block of queries with the keys up to its end.
Beside ours: the largest differencing method with equally many samples a rank, by tokens and by verl's estimate of work.

Sources: Karmarkar and Karp, The differencing method of set partitioning (1982); verl, utils/seqlen_balancing.py.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims import report, start
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from posttrain.config.derived import token_budget
from posttrain.config.schema import Architecture, Config
from posttrain.plan.resolve import resolve
from posttrain.rl.batching.packing import pack
from posttrain.rl.training.batch import sample_costs

BATCH, RANKS, SEEDS = 512, (8, 16, 32, 64), range(5)
PROMPT_TOKENS = 128
# Queries of a block of a flash kernel.
BLOCK = 128
CONFIG_DIR = Path(__file__).parents[1] / "config"


def main() -> None:
    """Print the table, and a line of JSON for the claim."""
    measure(RANKS, SEEDS)


def quick() -> None:
    """One batch of few, short samples on the fewest ranks."""
    measure(RANKS[:1], SEEDS[:1], batch=16, longest=160)


def measure(all_ranks: Sequence[int], seeds: Sequence[int], batch: int = BATCH, longest: int | None = None) -> None:
    """Print the table and the claim for some numbers of ranks, a batch for each seed."""
    config = resolve({"model": "qwen3_4b", "site": "local"}, CONFIG_DIR).config
    print("ranks  seed  largest sample / mean  ours   by tokens  by verl's work")
    worst = 0.0
    for num_ranks in all_ranks:
        for seed in seeds:
            lengths = lengths_of_batch(seed, batch, longest or token_budget(config))
            work = [counted(config.model.name, length) for length in lengths]
            sides = [
                [[i for row in rank for i in row] for rank in packed(config, lengths, num_ranks)],
                differenced(lengths, num_ranks),
                differenced([24_576 * length + length**2 for length in lengths], num_ranks),
            ]
            ratios = [imbalance(work, shares) for shares in sides]
            largest = max(work) * num_ranks / sum(work)
            print(f"{num_ranks:5}  {seed:4}  {largest:21.2f}  " + "  ".join(f"{ratio:.3f}" for ratio in ratios))
            # Where one sample is more than a rank's share, its rank is the most loaded whatever is done.
            worst = max(worst, ratios[0] / (1.05 if largest <= 1 else 1.02 * largest))
    what = f"{batch} samples on {all_ranks[0]} to {all_ranks[-1]} ranks"
    report(f"{what}: most loaded over mean, in units of what is allowed", worst, 1.0)


def lengths_of_batch(seed: int, batch: int, longest: int) -> list[int]:
    """Return the tokens of each sample."""
    source = random.Random(seed)
    return [min(PROMPT_TOKENS + max(int(source.lognormvariate(7.3, 1.0)), 16), longest) for _ in range(batch)]


def packed(config: Config, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Return what the trainer does."""
    return pack(lengths, sample_costs(config, lengths), token_budget(config), num_ranks)


def imbalance(work: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """Return the most loaded share over the mean."""
    loads = [sum(work[i] for i in share) for share in shares]
    return max(loads) * len(loads) / sum(loads)


def differenced(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Return equally many samples for each rank by the largest differencing method.

    The samples, by cost, make groups of one for each rank; two groups whose ranks differ most are joined, the most
    loaded ranks of one with the least loaded of the other, until one group is left.
    """
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def push(loads: list[tuple[float, list[int]]]) -> None:
        loads.sort(key=lambda load: -load[0])
        heapq.heappush(
            heap, (loads[-1][0] - loads[0][0], len(heap) + sum(len(load[1]) for load in loads) * BATCH, loads)
        )

    for first in range(0, len(order), num_ranks):
        push([(costs[i], [i]) for i in order[first : first + num_ranks]])
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, [*left, *right]) for (a, left), (b, right) in zip(one, reversed(other), strict=True)])
    return [members for _, members in heap[0][2]]


@functools.cache
def architecture(name: str) -> Architecture:
    """Return the dimensions of a model in config/models."""
    return resolve({"model": name, "site": "local"}, CONFIG_DIR).config.model.architecture


def attend_by_blocks(
    _layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return causal attention of query [1, H, S, D] over keys and values [1, G, S, D], as [1, S, H, D]."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    blocks = []
    for first in range(0, query.shape[2], BLOCK):
        end = min(first + BLOCK, query.shape[2])
        scores = query[:, :, first:end] @ key[:, :, :end].transpose(2, 3) * scaling
        hidden = torch.ones(end - first, end, dtype=torch.bool, device=query.device).triu(first + 1)
        blocks.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, :, :end])
    return torch.cat(blocks, 2).transpose(1, 2), None


AttentionInterface.register("causal_blocks", attend_by_blocks)


@functools.cache
def model(name: str) -> Qwen3ForCausalLM:
    """Return one layer and the ends of a model in config/models, without memory for the weights."""
    arch = architecture(name)
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    values: dict[str, Any] = {size: getattr(arch, size) for size in sizes}
    values |= {"num_hidden_layers": 1, "attn_implementation": "causal_blocks"}
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**values))


@functools.cache
def counted(name: str, length: int) -> float:
    """Return the operations that torch counts for a sample: layers are alike."""
    layers = architecture(name).num_hidden_layers
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(name)(tokens, attention_mask={"full_attention": None}, use_cache=False)
    of_modules = counter.get_flop_counts()
    of_layer, of_head = (sum(of_modules[f"Qwen3ForCausalLM.{part}"].values()) for part in ("model", "lm_head"))
    return layers * of_layer + of_head


if __name__ == "__main__":
    start(main, quick)

"""What BF16 costs: how far the trainer, and transformers' own model, are from transformers in FP32.

    python -m benchmarks.precision

Every family, small and with random weights that are exact in BF16, on one packed row; medians of seeds. Told are the
mean difference of a token's log-probability, and the gradient's error, over all weights, in units of the gradient (L2).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from benchmarks.claims import start
from tests.support.hub_tensors import fill
from tests.support.independent_grpo import by_hub_name
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.packed_rows import gradients_by_hub_name, run_packed
from tests.support.tiny_checkpoint import FAMILIES, make_random_checkpoint

from posttrain.config.schema import Architecture

LENGTHS, SEEDS = (48, 7, 33, 20), range(5)

# Log-probabilities [T], and gradients by the Hub's names.
Answer = tuple[torch.Tensor, dict[str, torch.Tensor]]


def main() -> None:
    """Print the table."""
    compare(FAMILIES, SEEDS)


def quick() -> None:
    """One family, one seed."""
    family = "qwen3"
    compare({family: FAMILIES[family]}, SEEDS[:1])


def compare(families: Mapping[str, Architecture], seeds: Sequence[int]) -> None:
    """Print the table of some families, medians over seeds."""
    print(f"{'family':14} {'log-probability':>22}   {'gradient':>22}")
    print(f"{'':14} {'ours':>8} {'transformers':>13}   {'ours':>8} {'transformers':>13}")
    for family, architecture in families.items():
        found = [deviations(architecture, seed) for seed in seeds]
        mine, theirs, my_gradient, their_gradient = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{family:14} {mine:8.4f} {theirs:13.4f}   {my_gradient:8.2%} {their_gradient:13.2%}")


def deviations(architecture: Architecture, seed: int) -> tuple[float, float, float, float]:
    """Return the deviations of a random model: log-probabilities of both sides, then gradients."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(2, architecture.vocab_size, (n,), generator=generator) for n in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        tensors = make_random_checkpoint(Path(folder), architecture, seed)
        exact, theirs = (reference(Path(folder), sequences, dtype) for dtype in (torch.float32, torch.bfloat16))
        sides = ours(architecture, tensors, sequences), theirs
    mine, their = (float((logprobs - exact[0]).abs().mean()) for logprobs, _ in sides)
    my_error, their_error = (error(gradients, exact[1]) for _, gradients in sides)
    return mine, their, my_error, their_error


def reference(folder: Path, sequences: list[torch.Tensor], dtype: torch.dtype) -> Answer:
    """Return the answer of transformers' model, each sequence for itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    logits = torch.cat([model(sequence[None]).logits[0] for sequence in sequences]).float()
    logprobs = torch.log_softmax(logits, -1).gather(1, labels_of(sequences)[:, None]).squeeze(1)
    logprobs.sum().backward()
    given = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return logprobs.detach(), {name: g.float() for name, grad in given for name, g in by_hub_name(name, grad)}


def ours(architecture: Architecture, tensors: dict[str, torch.Tensor], sequences: list[torch.Tensor]) -> Answer:
    """Return the answer of the trainer in BF16, with its gradients in FP32."""
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights

    config = test_config(architecture)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, params_dtype="bf16"))
    initialize_single_rank(config)
    policy = build_policy(config)
    weights = HubWeights(policy.chunks, architecture)
    fill(weights, tensors)
    policy.wrapped[0].zero_grad_buffer()
    logprobs = run_packed(policy, sequences, labels_of(sequences)[None])
    logprobs.sum().backward()
    return logprobs.detach() * config.rollout.temperature, gradients_by_hub_name(policy, weights)


def labels_of(sequences: list[torch.Tensor]) -> torch.Tensor:
    """Return [T] the next token of each, the first one's for the last."""
    return torch.cat(sequences).roll(-1)


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the L2 norm of the difference over that of the gradient."""
    square = sum(float((found[name] - gradient).square().sum()) for name, gradient in exact.items())
    return (square / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


if __name__ == "__main__":
    start(main, quick)

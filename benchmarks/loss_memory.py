"""Memory of the loss: log-probabilities of 16,384 tokens over GLM-5's vocabulary, forward and backward, in FP32.

    python -m benchmarks.loss_memory [--tokens 16384]

Each side runs in a process of its own, twice: over a few tokens, so that libraries have their working memory, then as
it is measured. Counted is the peak of the resident memory above what is resident before, less the gradients of hidden
states and matrix; in the unit of one chunk of logits. Beside ours: the plain formula, Liger's kernel and Apple's, which
this project does not install (`pip install --no-deps liger-kernel cut-cross-entropy triton`). Without a GPU Liger's
runs in Triton's interpreter, for few tokens; Apple's has a formula for torch's compiler instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.claims import report, start

from posttrain.rl.algorithm.logprobs import chunked_logprobs

VOCABULARY, HIDDEN, CHUNK = 154_880, 256, 1_024
CHUNK_BYTES = CHUNK * VOCABULARY * 4
# What holds all logits would need more than 24 GiB; an interpreter would need days.
ON_CPU = {} if torch.cuda.is_available() else {"liger": 16, "cut_cross_entropy": 2 * CHUNK}
MOST_TOKENS = {"naive": 2 * CHUNK} | ON_CPU

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of negative log-probabilities, as the trainer computes them."""
    return -chunked_logprobs(hidden, weight, targets, 1.0, CHUNK)[0].sum()


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the same over all logits."""
    return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the same by Liger's Triton kernel."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)


def cut_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the same by Apple's Triton kernel, or by its formula for torch's compiler."""
    from cut_cross_entropy import linear_cross_entropy

    kernel = "cce" if hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(hidden, weight, targets, reduction="sum", impl=kernel)


SIDES: dict[str, Loss] = {side.__name__: side for side in (ours, naive, liger, cut_cross_entropy)}


def main() -> None:
    """Measure every side and print the claims."""
    arguments = _arguments()
    if arguments.side:
        print(json.dumps(measure(SIDES[arguments.side], arguments.tokens)))
        return
    for name in SIDES:
        tokens = min(arguments.tokens, MOST_TOKENS.get(name, arguments.tokens))
        command = [sys.executable, "-m", "benchmarks.loss_memory", "--side", name, "--tokens", str(tokens)]
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if ON_CPU else {})
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"{name}: did not run: {ended.stderr.strip().splitlines()[-1]}")
            continue
        peak, seconds, loss = json.loads(ended.stdout.splitlines()[-1])
        print(f"{name}: {tokens} tokens, {peak / CHUNK_BYTES:.2f} chunks of logits, {seconds:.0f} s, loss {loss:.6g}")
        if name == "ours":
            report("peak of the loss over one chunk of logits", peak / CHUNK_BYTES, 1.3)


def quick() -> None:
    """Ours over 32 tokens, in this process."""
    peak, _, _ = measure(ours, 32)
    report("peak of the loss over one chunk of logits, 32 tokens", peak / CHUNK_BYTES, 1.3)


def measure(side: Loss, num_tokens: int) -> tuple[int, float, float]:
    """Return the peak in bytes above inputs and their gradients, the seconds, and the loss per token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    side(hidden[:8], weight, targets[:8]).backward()
    hidden.grad = weight.grad = None
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    loss = side(hidden, weight, targets)
    loss.backward()
    seconds = time.perf_counter() - started
    assert hidden.grad is not None
    assert weight.grad is not None
    peak = _status("VmHWM") - before - hidden.grad.nbytes - weight.grad.nbytes
    return peak, seconds, loss.item() / num_tokens


def _status(name: str) -> int:
    """Return a number of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16 * CHUNK)
    parser.add_argument("--side", choices=SIDES, help="measure this one alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    start(main, quick)

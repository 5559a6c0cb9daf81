"""Log-probabilities of given tokens, without ever holding all logits.

    logprob(t) = logits(t)[target] - logsumexp(logits(t)),   logits(t) = hidden(t) @ weight.T / temperature

Logits of T tokens are the largest activation of a step: 32,768 tokens x 154,880 words are 18.9 GiB in FP32, and the
softmax that the backward pass needs is as large again. So the tokens are taken in chunks, each computed under
activation checkpointing: the forward pass keeps one log-probability per token, the backward pass makes a chunk's logits
once more. The largest tensor has [chunk, V] elements. The price is one more product with the output matrix.

The temperature is the one at sampling: the policy that is trained is the one that sampled.
Shapes: T tokens, H hidden size, V vocabulary.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LogitsToLogprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def logprobs_from_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of each target.

    Args:
        logits: [..., V] any float type.
        targets: [...] int64.
        temperature: Above 0; the logits are divided by it.

    Returns:
        [...] fp32.

    Example:
        Logits (0, ln 3) and target 1: ln 3/4 = -0.2877; at temperature 0.5 the logits are (0, ln 9): ln 9/10 = -0.1054.
    """
    assert temperature > 0, f"temperature is {temperature}"
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    from_logits: LogitsToLogprobs = logprobs_from_logits,
) -> torch.Tensor:
    """Return the log-probability of each target from the last hidden states.

    Args:
        hidden: [T, H].
        weight: [V, H], the output matrix; under tensor parallelism this rank's rows of it.
        targets: [T] int64.
        temperature: Above 0.
        chunk_size: Tokens whose logits exist at a time; at least 1.
        from_logits: (logits [t, V] fp32, already divided by the temperature; targets [t]) to log-probabilities [t]. A
            vocabulary that is spread over ranks brings its own.

    Returns:
        [T] fp32, the same for every chunk size.
    """
    assert chunk_size >= 1, f"chunk_size is {chunk_size}"
    assert temperature > 0, f"temperature is {temperature}"

    def compute(some_hidden: torch.Tensor, some_targets: torch.Tensor) -> torch.Tensor:
        return from_logits(F.linear(some_hidden, weight).float() / temperature, some_targets)

    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    return torch.cat([checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks])

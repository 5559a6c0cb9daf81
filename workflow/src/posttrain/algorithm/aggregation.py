"""From losses per token to one number: the weight of each response token in the loss of a global batch.

    loss = sum over all response tokens of  weight * token loss

The weights are computed once per global batch, from lengths alone. So the loss and its gradient do not depend on how
the batch is cut into micro-batches or spread over ranks: sums add up. Three denominators, for N samples of lengths L_i:

    sample_mean   1 / (N * L_i)          every sample counts the same (GRPO)
    token_mean    1 / sum(L)             every token counts the same (DAPO)
    constant      1 / (N * longest)      no length enters (Dr. GRPO); `longest` is the response limit

Source: DeepSeekMath (arXiv 2402.03300), equation 3; DAPO (arXiv 2503.14476), section 3.3; Dr. GRPO (arXiv 2503.20783),
section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def token_weights(response_lengths: Sequence[int], aggregation: str, longest: int) -> torch.Tensor:
    """Return the weight of each response token of each sample.

    Args:
        response_lengths: L_i of every sample of the global batch.
        aggregation: "sample_mean", "token_mean" or "constant".
        longest: The response limit in tokens; used by "constant".

    Returns:
        [N] fp32.

    Example:
        Lengths (1, 3): sample_mean (1/2, 1/6), token_mean (1/4, 1/4), constant with a limit of 4 (1/8, 1/8).
    """
    lengths = torch.tensor(response_lengths, dtype=torch.float64)
    assert (lengths > 0).all(), f"a response without tokens: lengths {list(response_lengths)}"
    count = len(response_lengths)
    denominators = {
        "sample_mean": count * lengths,
        "token_mean": torch.full_like(lengths, float(lengths.sum())),
        "constant": torch.full_like(lengths, float(count * longest)),
    }
    return (1.0 / denominators[aggregation]).float()

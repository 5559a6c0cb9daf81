"""Operators on a CPU whose rows do not depend on which other rows are in the batch.

Why: a row of `x @ w` comes out with other last bits in a batch of 64 than alone, because the CPU
library picks its loop order by the number of rows; a sigmoid does, because the last few elements
of a tensor go through scalar instead of vector code. A sampled response would then depend on what
the server happened to run beside it, and rarely even flip a token.

How: every product is cut into blocks of `ROWS_PER_BLOCK` rows and every pointwise input into
vectors, the last one padded with zeros, so the library always sees the same shape and a row always
takes the same path. SGLang's own GPU mode does the same with fixed tiles in Triton.

Shapes: b = batch, m = rows, k = inner, n = columns, p = ceil(m / ROWS_PER_BLOCK) blocks.
"""

from collections.abc import Callable

import torch

ROWS_PER_BLOCK = 16
POINTWISE_BLOCK = 64  # a multiple of what one step of torch's vector loop takes

_overrides: list[torch.library.Library] = []


def enable_batch_invariant_operators() -> None:
    """Replace torch's products, sigmoid and silu on the CPU, in this process, once."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU")
    library.impl("addmm", _addmm, "CPU")
    library.impl("bmm", multiply_in_row_blocks, "CPU")
    library.impl("bmm.out", _bmm_out, "CPU")
    library.impl("sigmoid", pad_pointwise(torch.ops.aten.sigmoid.out), "CPU")
    library.impl("silu", pad_pointwise(torch.ops.aten.silu.out), "CPU")
    _overrides.append(library)  # dropping the library would undo the replacement


def multiply_in_row_blocks(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute `left @ right`, each row independent of the number of rows.

    Args:
        left: [b, m, k].
        right: [b, k, n], same dtype.

    Returns:
        [b, m, n]
    """
    b, m, k = left.shape
    n = right.shape[2]
    p = -(-m // ROWS_PER_BLOCK)
    padded = left.new_zeros(b, p * ROWS_PER_BLOCK, k)
    padded[:, :m] = left
    blocks = padded.view(b * p, ROWS_PER_BLOCK, k)
    right_per_block = right[:, None].expand(b, p, k, n).reshape(b * p, k, n)
    product = left.new_empty(b * p, ROWS_PER_BLOCK, n)
    # baddbmm is the one batched product that is not replaced; beta=0 ignores its first argument
    product = torch.baddbmm(product, blocks, right_per_block, beta=0)
    return product.view(b, p * ROWS_PER_BLOCK, n)[:, :m]


def pad_pointwise(
    operator_out: Callable[..., torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a pointwise operator treat every element alike, wherever it stands in the tensor.

    Args:
        operator_out: The operator's variant that writes to `out`, which is not replaced.

    Returns:
        The operator, from a tensor of any shape to a new tensor of that shape.
    """

    def apply_to_padded(x: torch.Tensor) -> torch.Tensor:
        size = x.numel()
        padded = x.new_zeros(-(-size // POINTWISE_BLOCK) * POINTWISE_BLOCK)
        padded[:size] = x.reshape(-1)
        return operator_out(padded, out=torch.empty_like(padded))[:size].view(x.shape)

    return apply_to_padded


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return multiply_in_row_blocks(left[None], right[None])[0]


def _bmm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(multiply_in_row_blocks(left, right))


def _addmm(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return torch.add(bias * beta, _mm(left, right), alpha=alpha)

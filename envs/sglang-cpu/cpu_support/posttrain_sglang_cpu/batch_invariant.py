"""Matrix products on a CPU whose rows do not depend on which other rows are in the batch.

Why: a row of `x @ w` comes out with other last bits in a batch of 64 than alone, because the CPU
library picks its loop order by the number of rows. A sampled response would then depend on what
the server happened to run beside it.

How: every product is cut into blocks of `ROWS_PER_BLOCK` rows, the last one padded with zeros, so
the library always sees the same shape and a row always takes the same path. The same trick makes
SGLang's GPU mode deterministic (fixed tiles), there with Triton kernels.

Shapes: b = batch, m = rows, k = inner, n = columns, p = ceil(m / ROWS_PER_BLOCK) blocks.
"""

import torch

ROWS_PER_BLOCK = 16

_overrides: list[torch.library.Library] = []


def enable_batch_invariant_products() -> None:
    """Replace torch's matrix products on the CPU, in this process, once."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU")
    library.impl("addmm", _addmm, "CPU")
    library.impl("bmm", multiply_in_row_blocks, "CPU")
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


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return multiply_in_row_blocks(left[None], right[None])[0]


def _addmm(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    product = _mm(left, right)
    return torch.add(bias * beta if beta != 1 else bias, product, alpha=alpha)

"""A stand-in, in plain torch, for the `sgl_kernel` package on a CPU.

Obstacle: SGLang 0.5.23 imports `sgl_kernel` unconditionally on a CPU, but the published
`sglang-kernel` wheel holds CUDA libraries only and the package has no source release; the CPU
build exists for AMX machines alone.

This package defines what serving needs, and nothing else:

* `assign_req_to_token_pool_cpu`: the KV slots of each request's new tokens;
* `torch.ops.sgl_kernel.murmur_hash32_cpu`: the hash behind `sampling_seed`;
* `mamba` and `qwen3_5`: Qwen3.5's gated delta nets and gated attention;
* any other name can be imported (SGLang does so at module level) and raises when called.

It must not define `torch.ops.sgl_kernel.convert_weight_packed`: that name tells SGLang that AMX
kernels exist. Without it every layer takes its `forward_native`, which is plain torch.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+posttrain.cpu"

_UINT32_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the freshly allocated KV slots into each request's row of the token table.

    Args:
        req_pool_indices: [num_requests] row of each request in `req_to_token`.
        req_to_token: [num_rows, pool_len] int32, changed in place.
        start_offset: [num_requests] first new token position of each request.
        end_offset: [num_requests] one past the last new token position.
        out_cache_loc: [num_new_tokens] slots, the requests' shares one after the other.
        pool_len: width of `req_to_token`; unused, part of SGLang's signature.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = max(end - start, 0)
        slots = out_cache_loc[taken : taken + count]
        req_to_token[row, start : start + count] = slots.to(req_to_token.dtype)
        taken += count


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash (seed, position, token id) to 32 bits, the same bits as SGLang's Triton kernel.

    SGLang draws token j at position p of a request with seed s by adding the Gumbel noise of
    hash(s, p, j), so equal bits here mean equal samples on CPU and GPU for equal logits.

    Args:
        seed: [num_requests] uint64.
        positions: [num_requests] integer position of the token to draw.
        col_indices: [vocab_size] integer token ids.

    Returns:
        [num_requests, vocab_size] int64 hashes in [0, 2**32).

    Source:
        MurmurHash3_x86_32 over the blocks seed_low, seed_high, position, token id
        (`sglang/kernels/ops/sampling/murmur_hash.py`).
    """
    seed = seed.view(torch.int64)
    blocks = (
        seed & _UINT32_MASK,
        (seed >> 32) & _UINT32_MASK,
        positions.to(torch.int64) & _UINT32_MASK,
    )
    state = torch.zeros_like(seed)
    for block in blocks:
        state = _mix_block(state, block)
    state = _mix_block(state[:, None], col_indices.to(torch.int64)[None, :])
    return _mix_final(state ^ 16)  # 16 bytes were hashed


def _mix_block(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Mix one 32-bit block into the hash state (both int64 in [0, 2**32))."""
    block = _multiply_uint32(block, 0xCC9E2D51)
    block = _multiply_uint32(_rotate_left(block, 15), 0x1B873593)
    state = _rotate_left(state ^ block, 13)
    return (_multiply_uint32(state, 5) + 0xE6546B64) & _UINT32_MASK


def _mix_final(state: torch.Tensor) -> torch.Tensor:
    """Spread the last block over all 32 bits."""
    state = _multiply_uint32(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply_uint32(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _UINT32_MASK


def _multiply_uint32(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply modulo 2**32; int64 overflow wraps and leaves the low 32 bits right."""
    return (value * factor) & _UINT32_MASK


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Let SGLang import kernels that serving never calls; a call says which one is missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in (posttrain-sglang-cpu)")

    return missing_kernel


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")

# SGLang's modules read their operators while they are imported.
import sgl_kernel.mamba  # noqa: E402
import sgl_kernel.qwen3_5  # noqa: E402, F401

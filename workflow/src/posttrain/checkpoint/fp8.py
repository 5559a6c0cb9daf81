"""The one FP8 quantiser, offline and for weight sync, and the one list of what is quantised.

E4M3 (`torch.float8_e4m3fn`) has a sign, 4 bits of exponent with bias 7, and 3 bits of fraction:

    normal numbers      (1 + f/8) * 2^(e-7)   e = 1..15, f = 0..7     2^-6 to 448
    subnormal numbers   (f/8) * 2^-6          f = 1..7                2^-9 to 7 * 2^-9
    zeros               +0 and -0
    NaN                 codes 0x7f and 0xff; there is no infinity, and 448 = 1.75 * 2^8 is the largest

Neighbours differ by 1/8 of their power of two, so rounding to the nearest moves a normal number by at most
1/16 of itself, and a smaller one by at most 2^-10. Weights fit into that range only after scaling. One scale
for a whole matrix lets its largest entry push all others towards zero; one scale for each block of 128 x 128
confines it to its block, and costs 4 bytes in 16384.

    scale = amax / 448            per block, FP32; amax is the largest magnitude in the block
    code  = round(w / scale)      to the nearest E4M3 number, halfway to the even one
    w     = code * scale          what the engine multiplies with

    |w - code * scale| <= max(|w| / 16, scale / 1024)        scale / 1024 = amax / 458752

(and rounding errors of FP32, some 2^-24 of each side). What is easily got wrong, and how it is here:

- A block of zeros would divide 0 by 0. Its scale is 1 and its codes are zeros.
- amax / 448 below 2^-126 would be subnormal or zero in FP32, and some devices take it for zero. The scale is
  never below 2^-126: a block whose magnitudes are all below 5e-36 uses a part of the range. The bound holds.
- Division may yield 448.00003 for the largest weight. The quotient is cut off at 448 before it is rounded,
  because the conversion makes NaN of what lies beyond.
- At the right and lower edge a block is smaller. Nothing is padded into the result.
- NaN and infinity have no place in weights: they are refused, with the tensor's name.
- Signs survive, also those of zeros.

Scales are free FP32 numbers, not powers of two, so `quantization_config` has no `scale_fmt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.checkpoint.safetensors_io import TensorSpec
from posttrain.errors import CheckpointError

BLOCK = 128
E4M3_MAX = 448.0
# Above this a number is closer to 480, which E4M3 does not have, than to 448.
E4M3_SATURATION = 464.0
SMALLEST_SCALE = 2.0**-126
SCALE_SUFFIX = "_scale_inv"
# What is quantised: the matrices of attention and indexer, and of every kind of MLP. Not: embedding,
# lm_head, norms, the router, the indexer's weights_proj, and eh_proj of the MTP layer; engines compute with
# these in BF16 or FP32.
_QUANTIZED = {
    "attention": r"self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)",
    "indexer": r"self_attn\.indexer\.(?:wq_b|wk)",
    "dense_mlp": r"mlp\.(?:gate_proj|up_proj|down_proj)",
    "experts": r"mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)",
    "shared_experts": r"mlp\.shared_experts\.(?:gate_proj|up_proj|down_proj)",
}
_PATTERNS = {kind: re.compile(rf"model\.layers\.\d+\.{part}\.weight") for kind, part in _QUANTIZED.items()}


# ---- what is quantised ----


def is_quantized(hf_name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is served in FP8.

    Args:
        hf_name: Its name on the Hub.
        shape: Its dimensions.
    """
    return len(shape) == 2 and tensor_class(hf_name) != "unquantized"


def tensor_class(hf_name: str) -> str:
    """Return "attention", "indexer", "dense_mlp", "experts", "shared_experts" or "unquantized"."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(hf_name)), "unquantized")


def served_specs(hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of what `quantize_named` makes of a tensor, without its data."""
    if not is_quantized(hf_name, spec.shape):
        return {hf_name: spec}
    rows, columns = (-(-size // BLOCK) for size in spec.shape)
    scale = TensorSpec((rows, columns), "F32")
    return {hf_name: TensorSpec(spec.shape, "F8_E4M3"), hf_name + SCALE_SUFFIX: scale}


def quantize_named(hf_name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what engines are given for one tensor of the Hub: weight and scale, or the tensor itself.

    Args:
        hf_name: Its name on the Hub.
        tensor: Its values, in any float dtype.

    Raises:
        CheckpointError: When a tensor that is quantised has a NaN or an infinity.
    """
    if not is_quantized(hf_name, tuple(tensor.shape)):
        return [(hf_name, tensor)]
    codes, scale = quantize_block(tensor, name=hf_name)
    return [(hf_name, codes), (hf_name + SCALE_SUFFIX, scale)]


def quantization_config(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    Args:
        specs: Name -> shape and dtype of all tensors of the source.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": unquantized_modules(specs),
    }


def unquantized_modules(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the modules with a matrix that is not quantised, in the order of their tensors."""
    matrices: Iterable[str] = (name for name, spec in specs.items() if len(spec.shape) == 2)
    return [name.removesuffix(".weight") for name in matrices if not is_quantized(name, specs[name].shape)]


# ---- the maths: weights [N, K] in blocks of [b, b], scales [ceil(N/b), ceil(K/b)] ----


def quantize_block(weight: torch.Tensor, block: int = BLOCK, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix with one scale per block.

    Args:
        weight: [N, K] of any float dtype; computed in FP32.
        block: Rows and columns of a block.
        name: Named when a weight is not finite.

    Returns:
        codes [N, K] float8_e4m3fn, scale [ceil(N/block), ceil(K/block)] float32.

    Raises:
        CheckpointError: When a weight is NaN or infinite.

    Example:
        [[448., -7.]] gives codes [[448, -7]] and scale [[1.]]; [[0., 0.]] gives codes [[0, 0]] and scale
        [[1.]].
    """
    scale = block_scale(weight, block, name)
    return encode_block(weight, scale, block), scale


def block_scale(weight: torch.Tensor, block: int = BLOCK, name: str = "weight") -> torch.Tensor:
    """Return the scales alone, [ceil(N/block), ceil(K/block)] float32; see `quantize_block`."""
    return _scale_of(tiles(weight.float(), block).abs().amax(dim=(1, 3)), name)


def encode_block(weight: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return the codes [N, K] for given scales; see `quantize_block`."""
    num_rows, num_columns = weight.shape
    codes = _round_to_e4m3(tiles(weight.float(), block) / scale[:, None, :, None])
    return codes.flatten(0, 1).flatten(1, 2)[:num_rows, :num_columns].contiguous()


def dequantize_block(codes: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return code * scale.

    Args:
        codes: [N, K] float8_e4m3fn.
        scale: [ceil(N/block), ceil(K/block)] float32.
        block: Rows and columns of a block.

    Returns:
        [N, K] float32.
    """
    num_rows, num_columns = codes.shape
    values = tiles(codes.float(), block) * scale[:, None, :, None]
    return values.flatten(0, 1).flatten(1, 2)[:num_rows, :num_columns].contiguous()


def quantize_channel(weight: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per row: codes [N, K] float8_e4m3fn, scale [N, 1] float32."""
    values = weight.float()
    scale = _scale_of(values.abs().amax(dim=1, keepdim=True), name)
    return _round_to_e4m3(values / scale), scale


def quantize_tensor(weight: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale for all: codes [N, K] float8_e4m3fn, scale [] float32."""
    values = weight.float()
    scale = _scale_of(values.abs().amax(), name)
    return _round_to_e4m3(values / scale), scale


def tiles(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [N, K] as [ceil(N/block), block, ceil(K/block), block]; what lies beyond an edge is 0."""
    num_rows, num_columns = values.shape
    missing_rows, missing_columns = -num_rows % block, -num_columns % block
    if missing_rows or missing_columns:
        values = F.pad(values, (0, missing_columns, 0, missing_rows))
    return values.unflatten(0, (-1, block)).unflatten(2, (-1, block))


def _scale_of(amax: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(amax).all():
        raise CheckpointError(f"{name}: holds NaN or infinity; weights must be finite to be quantised")
    scale = (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _round_to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

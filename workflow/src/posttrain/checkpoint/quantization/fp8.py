"""The FP8 quantiser, for files and for weight sync.

E4M3 (`torch.float8_e4m3fn`) has a sign, 4 bits of exponent with bias 7, and 3 bits of fraction:

    normal numbers      (1 + f/8) * 2^(e-7)   e = 1..15, f = 0..7     2^-6 to 448
    subnormal numbers   (f/8) * 2^-6          f = 1..7                2^-9 to 7 * 2^-9
    zeros               +0 and -0
    NaN                 codes 0x7f and 0xff; there is no infinity, and 448 = 1.75 * 2^8 is the largest

Neighbours differ by 1/8 of their power of two, so rounding to the nearest changes a normal number by at most 1/16 of
its value, and a smaller one by at most 2^-10. Weights need a scale to fit into that range. With one scale per matrix,
its largest entry pushes all others towards zero; a scale per row ("channel") limits this to the row, a scale per block
of 128 x 128 to the block, at a cost of 4 bytes in 16384.

    scale = amax / 448            FP32; amax is the largest magnitude under the scale
    code  = round(w / scale)      to the nearest E4M3 number, ties to even
    w     = code * scale          the weight that the engine uses

    |w - code * scale| <= max(|w| / 16, scale / 1024)        scale / 1024 = amax / 458752

(plus FP32 rounding errors of a relative 2^-24). Special cases:

- A block of zeros would divide 0 by 0. Its scale is 1 and its codes are zeros.
- amax / 448 below 2^-126 would be subnormal or zero in FP32, which some devices flush to zero. The scale is clamped to
  2^-126: a block whose magnitudes are all below 5e-36 uses part of the range. The bound holds.
- Division may yield 448.00003 for the largest weight. The quotient is clamped to 448 before it is rounded; torch's
  conversion saturates on a CPU, others produce NaN.
- 256 times a scale of 2^120 is infinite in FP32. Only a power-of-two scale gets so large; codes then stop at 240.
- Blocks at the right and lower edge are smaller. The result contains no padding.
- NaN and infinite weights raise an error with the tensor's name.
- Signs are preserved, including those of zeros.

A scale can be raised to the next power of two (UE8M0, used by tensor cores with block scales): the quotient is then
exact, and up to one of the 8 bits is unused. `quantization_config` declares it with `scale_fmt`. Blocks are declared as
"fp8", like DeepSeek's checkpoints; channels and tensors in the format of compressed-tensors, which SGLang and vLLM
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.quantized_names import Selection, fused_with, unquantized_modules
from posttrain.errors import CheckpointError

# The side of DeepSeek-V3's blocks, which all kernels use.
BLOCK = 128
E4M3_MAX = 448.0
# The smallest normal float32: GPUs may flush smaller scales to zero, and divide by it.
SMALLEST_SCALE = 2.0**-126
# From this scale on, a code of 256 is infinite; the largest code below 256.
LARGE_SCALE, E4M3_BELOW_256 = 2.0**120, 240.0
# Suffixes of block scales, as in DeepSeek's checkpoints, and of channel and tensor scales in compressed-tensors.
SCALE_SUFFIX, PLAIN_SCALE_SUFFIX = "_scale_inv", "_scale"
SCALE_SUFFIXES = (SCALE_SUFFIX, PLAIN_SCALE_SUFFIX)
# Values per step: on a CPU their FP32 copies fit into its cache; a GPU needs many to be fully used.
SLAB_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 28}


@dataclass(frozen=True)
class Fp8Format:
    """FP8 weight format of engines.

    Args:
        strategy: Granularity of scales: "block" (128 x 128), "channel" (a row) or "tensor". Matrices that an engine
            fuses share their "tensor" scale.
        scale: "fp32", or "power_of_two" for blocks.
        selection: Tensors to quantise.
    """

    strategy: str = "block"
    scale: str = "fp32"
    selection: Selection = field(default_factory=Selection)

    @property
    def scale_suffix(self) -> str:
        """Suffix that a weight's name gets for its scale."""
        return SCALE_SUFFIX if self.strategy == "block" else PLAIN_SCALE_SUFFIX

    def sharing_scale(self, hf_name: str) -> tuple[str, ...]:
        """Return the tensors that share a scale through their joint maximum; () for scales of rows or blocks."""
        return fused_with(hf_name) if self.strategy == "tensor" else ()

    def served_specs(self, hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of the output of `quantize`, without computing it."""
        rows, columns = spec.shape
        scale = {"block": (-(-rows // BLOCK), -(-columns // BLOCK)), "channel": (rows, 1), "tensor": ()}[self.strategy]
        return {hf_name: TensorSpec(spec.shape, "F8_E4M3"), hf_name + self.scale_suffix: TensorSpec(scale, "F32")}

    def quantize(
        self, hf_name: str, weight: torch.Tensor, shared_amax: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return codes and scale of a matrix under the engines' names.

        Args:
            hf_name: Hub name.
            weight: [N, K] of any float dtype.
            shared_amax: Largest magnitude over all tensors of `sharing_scale`.

        Raises:
            CheckpointError: A weight is NaN or infinite.
        """
        if self.strategy == "block":
            codes, scale = quantize_block(weight, name=hf_name, power_of_two=self.scale == "power_of_two")
        elif self.strategy == "channel":
            codes, scale = quantize_channel(weight, hf_name)
        else:
            codes, scale = quantize_tensor(weight, hf_name, shared_amax)
        return {hf_name: codes, hf_name + self.scale_suffix: scale}

    def magnitudes(self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0)) -> torch.Tensor:
        """Return the largest magnitudes in a part of a matrix, one for each scale that covers some of it.

        Args:
            part: [..., n, k] of any float dtype.
            corner: First row and column of the part.

        Returns:
            fp32, in the shape of the part's scales; the maximum over all parts determines the scales.
        """
        if self.strategy == "tensor":
            return largest_magnitude(part)
        if self.strategy == "channel":
            slabs = [part[..., rows, :].float() for rows in row_slabs(part)]
            return torch.cat([slab.abs().amax(dim=-1, keepdim=True) for slab in slabs], dim=-2)
        part = _aligned(part, corner)
        slabs = [part[..., rows, :].float() for rows in row_slabs(part, BLOCK)]
        return torch.cat([_tile_magnitudes(tiles(slab, BLOCK)) for slab in slabs], dim=-2)

    def quantize_part(
        self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0), magnitudes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [..., n, k] and scales of a part of a matrix; the parts combine to the result of `quantize`.

        Args:
            part: [..., n, k] of any float dtype; leading axes stack matrices, except for "tensor". NaN and infinity are
                not checked, because the check would wait for the GPU; they yield scales that are not finite.
            corner: First row and column of the part.
            magnitudes: Result of `magnitudes`, merged over all parts. Required if other parts share the scales.
        """
        amax = self.magnitudes(part, corner) if magnitudes is None else magnitudes
        if self.strategy == "tensor":
            return quantize_tensor(part, "", amax)
        if self.strategy == "channel":
            return quantize_channel(part, "", amax)
        codes, scale = quantize_block(_aligned(part, corner), BLOCK, "", self.scale == "power_of_two", amax)
        return _last(codes, part.shape), scale

    def served_values(
        self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0), magnitudes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weights that an engine computes with for a part: codes times scales, [..., n, k] fp32.

        Args:
            part: See `quantize_part`.
            corner: First row and column of the part.
            magnitudes: See `quantize_part`.
        """
        codes, scale = self.quantize_part(part, corner, magnitudes)
        if self.strategy != "block":
            return dequantize(codes, scale)
        aligned = _aligned(codes.view(torch.uint8), corner).view(codes.dtype)
        return _last(dequantize_block(aligned, scale), part.shape)

    def quantization_config(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json.

        Args:
            specs: Name -> shape and dtype of all source tensors.
        """
        unquantized = unquantized_modules(specs, self.selection)
        if self.strategy != "block":
            return _compressed_tensors_config(self.strategy, unquantized)
        declared = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": unquantized,
        }
        return declared | ({"scale_fmt": "ue8m0"} if self.scale == "power_of_two" else {})

    def other_files(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return further files of the folder; FP8 has none."""
        return {}


def _compressed_tensors_config(strategy: str, ignored: list[str]) -> dict[str, Any]:
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**float8, "strategy": strategy, "dynamic": False},
        "input_activations": {**float8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def quantize_named(
    hf_name: str, tensor: torch.Tensor, served: Fp8Format | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that engines receive for a Hub tensor: weight and scale, or the tensor itself.

    Args:
        hf_name: Hub name.
        tensor: Values in any float dtype.
        served: The format; by default blocks with FP32 scales.

    Raises:
        CheckpointError: A tensor to quantise contains NaN or infinity.
    """
    served = served or Fp8Format()
    if not served.selection.includes(hf_name, tensor.shape):
        return [(hf_name, tensor)]
    return list(served.quantize(hf_name, tensor).items())


# ---- the maths: weights [N, K] in blocks of [b, b], scales [ceil(N/b), ceil(K/b)]; leading axes stack matrices ----


def quantize_block(
    weight: torch.Tensor,
    block: int = BLOCK,
    name: str = "weight",
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix with one scale per block.

    Args:
        weight: [N, K] of any float dtype; computed in FP32.
        block: Rows and columns of a block.
        name: Name for the error about a value that is not finite; "" skips the check.
        power_of_two: Raise each scale to the next power of two.
        amax: Largest magnitudes, in the shape of `scale`, for scales that are shared with other parts.

    Returns:
        codes [N, K] float8_e4m3fn, scale [ceil(N/block), ceil(K/block)] float32.

    Raises:
        CheckpointError: A weight is NaN or infinite.

    Example:
        [[448., -7.]] gives codes [[448, -7]] and scale [[1.]]; [[0., 0.]] gives codes [[0, 0]] and scale
        [[1.]].
    """
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for rows in row_slabs(weight, block):
        values, of_rows = tiles(weight[..., rows, :].float(), block), slice(rows.start // block, -(-rows.stop // block))
        scale = _scale_of(_tile_magnitudes(values) if amax is None else amax[..., of_rows, :], name)
        scales.append(_next_power_of_two(scale) if power_of_two else scale)
        spread = scales[-1][..., :, None, :, None]
        largest = torch.where(spread < LARGE_SCALE, E4M3_MAX, E4M3_BELOW_256) if power_of_two else E4M3_MAX
        of_slab = codes[..., rows, :]
        of_slab.copy_(_untiled(_scaled(values, spread, largest), of_slab.shape))
    return codes, torch.cat(scales, dim=-2)


def quantize_channel(
    weight: torch.Tensor, name: str = "weight", amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per row: codes [N, K] float8_e4m3fn, scale [N, 1] float32; see `quantize_block`."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for rows in row_slabs(weight):
        values = weight[..., rows, :].float()
        largest = values.abs().amax(dim=-1, keepdim=True) if amax is None else amax[..., rows, :]
        scales.append(_scale_of(largest, name))
        codes[..., rows, :] = _scaled(values, scales[-1])
    return codes, torch.cat(scales, dim=-2)


def quantize_tensor(
    weight: torch.Tensor, name: str = "weight", amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per matrix: codes [N, K] float8_e4m3fn, scale [] float32.

    Args:
        weight: [N, K] of any float dtype.
        name: Name for the error about a value that is not finite; "" skips the check.
        amax: Largest magnitude, for a scale that is shared with other matrices.
    """
    scale = _scale_of(largest_magnitude(weight) if amax is None else amax, name)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in row_slabs(weight):
        codes[rows] = _scaled(weight[rows].float(), scale)
    return codes, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return code * scale.

    Args:
        codes: [N, K] float8_e4m3fn.
        scale: float32: [] or [1] per tensor, [N, 1] per row, otherwise [ceil(N/block), ceil(K/block)].
        block: Rows and columns of a block.

    Returns:
        [N, K] float32.
    """
    if scale.numel() == 1 or scale.shape == (*codes.shape[:-1], 1):
        return codes.float() * scale
    return dequantize_block(codes, scale, block)


def dequantize_block(codes: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return code * scale for block scales; see `dequantize`."""
    return _untiled(tiles(codes.float(), block) * scale[..., :, None, :, None], codes.shape).contiguous()


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, [] float32; NaN if a weight is NaN."""
    return torch.stack([weight[rows].float().abs().amax() for rows in row_slabs(weight)]).amax()


def row_slabs(weight: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Return consecutive row ranges of a matrix; see `row_ranges`."""
    return row_ranges(tuple(weight.shape), multiple, weight.device.type)


def row_ranges(shape: tuple[int, ...], multiple: int = 1, device: str = "cpu") -> Iterator[slice]:
    """Return consecutive row ranges of about `SLAB_ELEMENTS` elements.

    Args:
        shape: [..., N, K].
        multiple: The length of each range except the last is a multiple of this.
        device: Device type.
    """
    num_rows, num_columns = shape[-2:]
    step = max(multiple, SLAB_ELEMENTS[device] // max(1, num_columns) // multiple * multiple)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def tiles(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [..., N, K] as [..., ceil(N/b), b, ceil(K/b), b], padded with 0.

    b is `block`, or the matrix's own side where that is smaller: a small matrix is not padded to a whole block.
    """
    height, width = (min(block, max(1, side)) for side in values.shape[-2:])
    missing_rows, missing_columns = -values.shape[-2] % height, -values.shape[-1] % width
    if missing_rows or missing_columns:
        values = F.pad(values, (0, missing_columns, 0, missing_rows))
    return values.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))


def _tile_magnitudes(tiled: torch.Tensor) -> torch.Tensor:
    return tiled.abs().amax(dim=(-3, -1))


def _aligned(part: torch.Tensor, corner: tuple[int, ...]) -> torch.Tensor:
    """Pad a part of a matrix with zeros above and to the left, up to block boundaries."""
    above, left = (start % BLOCK for start in corner)
    return F.pad(part, (left, 0, above, 0)) if above or left else part


def _untiled(tiled: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tiled.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]


def _last(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the last rows and columns of matrices."""
    return values[..., values.shape[-2] - shape[-2] :, values.shape[-1] - shape[-1] :]


def _scale_of(amax: torch.Tensor, name: str) -> torch.Tensor:
    if name and not torch.isfinite(amax).all():
        raise CheckpointError(
            "values-not-finite", f"{name}: holds NaN or infinity; weights must be finite to be quantised"
        )
    scale = divide(amax, E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def divide(values: torch.Tensor, by: float) -> torch.Tensor:
    """Return `values / by`, rounded once: GPUs divide by a tensor, but multiply by a number's reciprocal."""
    return values / values.new_full((), by)


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    # A normal float32 is a power of two if its 23 fraction bits are zero.
    bits = scale.view(torch.int32) + 0x7FFFFF
    return (bits & 0x7F800000).view(torch.float32)


def _scaled(values: torch.Tensor, scale: torch.Tensor, largest: Any = E4M3_MAX) -> torch.Tensor:
    return (values / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)

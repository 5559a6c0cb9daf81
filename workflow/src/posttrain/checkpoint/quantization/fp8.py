"""The one FP8 quantiser, offline and for weight sync.

E4M3 (`torch.float8_e4m3fn`) has a sign, 4 bits of exponent with bias 7, and 3 bits of fraction:

    normal numbers      (1 + f/8) * 2^(e-7)   e = 1..15, f = 0..7     2^-6 to 448
    subnormal numbers   (f/8) * 2^-6          f = 1..7                2^-9 to 7 * 2^-9
    zeros               +0 and -0
    NaN                 codes 0x7f and 0xff; there is no infinity, and 448 = 1.75 * 2^8 is the largest

Neighbours differ by 1/8 of their power of two, so rounding to the nearest moves a normal number by at most
1/16 of itself, and a smaller one by at most 2^-10. Weights fit into that range only after scaling. One scale
for a whole matrix lets its largest entry push all others towards zero; one for each row ("channel") confines
it to its row, one for each block of 128 x 128 to its block, which costs 4 bytes in 16384.

    scale = amax / 448            FP32; amax is the largest magnitude under the scale
    code  = round(w / scale)      to the nearest E4M3 number, halfway to the even one
    w     = code * scale          what the engine multiplies with

    |w - code * scale| <= max(|w| / 16, scale / 1024)        scale / 1024 = amax / 458752

(and rounding errors of FP32, some 2^-24 of each side). What is easily got wrong, and how it is here:

- A block of zeros would divide 0 by 0. Its scale is 1 and its codes are zeros.
- amax / 448 below 2^-126 would be subnormal or zero in FP32, and some devices take it for zero. The scale is
  never below 2^-126: a block whose magnitudes are all below 5e-36 uses a part of the range. The bound holds.
- Division may yield 448.00003 for the largest weight. The quotient is cut off at 448 before it is rounded: torch's
  conversion on a CPU does the same, others make NaN of what lies beyond.
- 256 times a scale of 2^120 is infinite in FP32. Only a power of two gets so large; codes stop at 240 then.
- At the right and lower edge a block is smaller. Nothing is padded into the result.
- NaN and infinity have no place in weights: they are refused, with the tensor's name.
- Signs survive, also those of zeros.

A scale can be raised to the next power of two (UE8M0, what tensor cores with block scales multiply with): the
quotient is then exact, and up to one of the 8 bits goes unused. `quantization_config` says so with
`scale_fmt`, and only then. Blocks are declared as "fp8", as DeepSeek's checkpoints are; channels and tensors
in the format of compressed-tensors, which SGLang and vLLM read for them.
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

# The side of DeepSeek-V3's blocks, which is that of every kernel for them.
BLOCK = 128
E4M3_MAX = 448.0
# The smallest normal float32: GPUs may take what is below for zero, and divide by it.
SMALLEST_SCALE = 2.0**-126
# From this scale on a code of 256 is infinite; the largest code below it.
LARGE_SCALE, E4M3_BELOW_256 = 2.0**120, 240.0
# Of a block's scales, as DeepSeek names them, and of a channel's or a tensor's in compressed-tensors.
SCALE_SUFFIX, PLAIN_SCALE_SUFFIX = "_scale_inv", "_scale"
SCALE_SUFFIXES = (SCALE_SUFFIX, PLAIN_SCALE_SUFFIX)
# Values worked on at a time: on a CPU their FP32 copies stay in its cache, a GPU needs many to be busy.
SLAB_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 28}


@dataclass(frozen=True)
class Fp8Format:
    """FP8 weights as engines load them.

    Args:
        strategy: What shares a scale: "block" (128 x 128), "channel" (a row) or "tensor". Matrices that an
            engine joins to one share their "tensor" scale.
        scale: "fp32", or "power_of_two" for blocks.
        selection: What is quantised.
    """

    strategy: str = "block"
    scale: str = "fp32"
    selection: Selection = field(default_factory=Selection)

    @property
    def scale_suffix(self) -> str:
        """The suffix that turns the name of a weight into that of its scale."""
        return SCALE_SUFFIX if self.strategy == "block" else PLAIN_SCALE_SUFFIX

    def sharing_scale(self, hf_name: str) -> tuple[str, ...]:
        """Return the tensors whose common largest magnitude makes the scale; () where parts of it do."""
        return fused_with(hf_name) if self.strategy == "tensor" else ()

    def served_specs(self, hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of what `quantize` makes of a tensor, without its data."""
        rows, columns = spec.shape
        scale = {"block": (-(-rows // BLOCK), -(-columns // BLOCK)), "channel": (rows, 1), "tensor": ()}[self.strategy]
        return {hf_name: TensorSpec(spec.shape, "F8_E4M3"), hf_name + self.scale_suffix: TensorSpec(scale, "F32")}

    def quantize(
        self, hf_name: str, weight: torch.Tensor, shared_amax: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return codes and scale of a matrix under the names that engines load.

        Args:
            hf_name: Its name on the Hub.
            weight: [N, K] of any float dtype.
            shared_amax: Largest magnitude of all tensors of `sharing_scale`.

        Raises:
            CheckpointError: When a weight is NaN or infinite.
        """
        if self.strategy == "block":
            codes, scale = quantize_block(weight, name=hf_name, power_of_two=self.scale == "power_of_two")
        elif self.strategy == "channel":
            codes, scale = quantize_channel(weight, hf_name)
        else:
            codes, scale = quantize_tensor(weight, hf_name, shared_amax)
        return {hf_name: codes, hf_name + self.scale_suffix: scale}

    def magnitudes(self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0)) -> torch.Tensor:
        """Return the largest magnitudes of a part of a matrix, one for each scale that it has a share in.

        Args:
            part: [n, k] of any float dtype.
            corner: Row and column of the matrix where the part begins.

        Returns:
            fp32, in the shape of the part's scales: those of all parts, maximum taken, make the scales.
        """
        if self.strategy == "tensor":
            return largest_magnitude(part)
        if self.strategy == "channel":
            return torch.cat([part[rows].float().abs().amax(dim=1, keepdim=True) for rows in row_slabs(part)])
        part = _aligned(part, corner)
        return torch.cat([_tile_magnitudes(tiles(part[rows].float(), BLOCK)) for rows in row_slabs(part, BLOCK)])

    def quantize_part(
        self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0), magnitudes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [n, k] and scales of a part of a matrix; together the parts' are those of `quantize`.

        Args:
            part: [n, k] of any float dtype. It is not checked for NaN and infinity, which would wait for the GPU; where
                it is not finite, scales are not either.
            corner: Row and column of the matrix where the part begins.
            magnitudes: See `magnitudes`; of all parts. Given, where scales are shared with other parts.
        """
        amax = self.magnitudes(part, corner) if magnitudes is None else magnitudes
        if self.strategy == "tensor":
            return quantize_tensor(part, "", amax)
        if self.strategy == "channel":
            return quantize_channel(part, "", amax)
        codes, scale = quantize_block(_aligned(part, corner), BLOCK, "", self.scale == "power_of_two", amax)
        return codes[-len(part) :, -part.shape[1] :], scale

    def served_values(
        self, part: torch.Tensor, corner: tuple[int, ...] = (0, 0), magnitudes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what an engine multiplies with for a part of a matrix: codes times scales, [n, k] fp32.

        Args:
            part: See `quantize_part`, as for the others.
            corner: Where it begins.
            magnitudes: What makes the scales.
        """
        codes, scale = self.quantize_part(part, corner, magnitudes)
        if self.strategy != "block":
            return dequantize(codes, scale)
        aligned = _aligned(codes.view(torch.uint8), corner).view(codes.dtype)
        return dequantize_block(aligned, scale)[-len(part) :, -part.shape[1] :]

    def quantization_config(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json.

        Args:
            specs: Name -> shape and dtype of all tensors of the source.
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
        """Return further files of the folder: none."""
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
    """Return what engines are given for one tensor of the Hub: weight and scale, or the tensor itself.

    Args:
        hf_name: Its name on the Hub.
        tensor: Its values, in any float dtype.
        served: The format; blocks with FP32 scales unless given.

    Raises:
        CheckpointError: When a tensor that is quantised has a NaN or an infinity.
    """
    served = served or Fp8Format()
    if not served.selection.includes(hf_name, tensor.shape):
        return [(hf_name, tensor)]
    return list(served.quantize(hf_name, tensor).items())


# ---- the maths: weights [N, K] in blocks of [b, b], scales [ceil(N/b), ceil(K/b)] ----


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
        name: Named when a weight is not finite; "" where nobody is to look.
        power_of_two: Raise each scale to the next power of two.
        amax: Largest magnitudes, in the shape of `scale`, where others share scales.

    Returns:
        codes [N, K] float8_e4m3fn, scale [ceil(N/block), ceil(K/block)] float32.

    Raises:
        CheckpointError: When a weight is NaN or infinite.

    Example:
        [[448., -7.]] gives codes [[448, -7]] and scale [[1.]]; [[0., 0.]] gives codes [[0, 0]] and scale
        [[1.]].
    """
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for rows in row_slabs(weight, block):
        values = tiles(weight[rows].float(), block)
        largest_here = _tile_magnitudes(values) if amax is None else amax[rows.start // block : -(-rows.stop // block)]
        scale = _scale_of(largest_here, name)
        scales.append(_next_power_of_two(scale) if power_of_two else scale)
        spread = scales[-1][:, None, :, None]
        largest = torch.where(spread < LARGE_SCALE, E4M3_MAX, E4M3_BELOW_256) if power_of_two else E4M3_MAX
        codes[rows] = _untiled(_scaled(values, spread, largest), codes[rows].shape)
    return codes, torch.cat(scales)


def quantize_channel(
    weight: torch.Tensor, name: str = "weight", amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per row: codes [N, K] float8_e4m3fn, scale [N, 1] float32; see `quantize_block`."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for rows in row_slabs(weight):
        values = weight[rows].float()
        largest = values.abs().amax(dim=1, keepdim=True) if amax is None else amax[rows]
        scales.append(_scale_of(largest, name))
        codes[rows] = _scaled(values, scales[-1])
    return codes, torch.cat(scales)


def quantize_tensor(
    weight: torch.Tensor, name: str = "weight", amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale for all: codes [N, K] float8_e4m3fn, scale [] float32.

    Args:
        weight: [N, K] of any float dtype.
        name: Named when a weight is not finite; "" where nobody is to look.
        amax: Largest magnitude, where others share the scale.
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
        scale: float32: [] or [1] for the tensor, [N, 1] for its rows, else [ceil(N/block), ceil(K/block)].
        block: Rows and columns of a block.

    Returns:
        [N, K] float32.
    """
    if scale.numel() == 1 or scale.shape == (codes.shape[0], 1):
        return codes.float() * scale
    return dequantize_block(codes, scale, block)


def dequantize_block(codes: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return code * scale for scales of blocks; see `dequantize`."""
    return _untiled(tiles(codes.float(), block) * scale[:, None, :, None], codes.shape).contiguous()


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, [] float32; NaN when a weight is NaN."""
    return torch.stack([weight[rows].float().abs().amax() for rows in row_slabs(weight)]).amax()


def row_slabs(weight: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Return ranges of rows of a matrix to work on one after the other; see `row_ranges`."""
    return row_ranges(tuple(weight.shape), multiple, weight.device.type)


def row_ranges(shape: tuple[int, ...], multiple: int = 1, device: str = "cpu") -> Iterator[slice]:
    """Return ranges of rows to work on one after the other, of about `SLAB_ELEMENTS`.

    Args:
        shape: [N, K].
        multiple: Each range but the last has a multiple of this many rows.
        device: Kind of the device that works.
    """
    num_rows, num_columns = shape
    step = max(multiple, SLAB_ELEMENTS[device] // max(1, num_columns) // multiple * multiple)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def tiles(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [N, K] as [ceil(N/block), block, ceil(K/block), block]; what lies beyond an edge is 0."""
    num_rows, num_columns = values.shape
    missing_rows, missing_columns = -num_rows % block, -num_columns % block
    if missing_rows or missing_columns:
        values = F.pad(values, (0, missing_columns, 0, missing_rows))
    return values.unflatten(0, (-1, block)).unflatten(2, (-1, block))


def _tile_magnitudes(tiled: torch.Tensor) -> torch.Tensor:
    return tiled.abs().amax(dim=(1, 3))


def _aligned(part: torch.Tensor, corner: tuple[int, ...]) -> torch.Tensor:
    """Return a part of a matrix with zeros above and left of it, up to the edges of blocks."""
    above, left = (start % BLOCK for start in corner)
    return F.pad(part, (left, 0, above, 0)) if above or left else part


def _untiled(tiled: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tiled.flatten(0, 1).flatten(1, 2)[: shape[0], : shape[1]]


def _scale_of(amax: torch.Tensor, name: str) -> torch.Tensor:
    if name and not torch.isfinite(amax).all():
        raise CheckpointError(f"{name}: holds NaN or infinity; weights must be finite to be quantised")
    scale = divide(amax, E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def divide(values: torch.Tensor, by: float) -> torch.Tensor:
    """Return `values / by`, rounded once: on GPUs torch multiplies with the reciprocal of a number, not of a tensor."""
    return values / values.new_full((), by)


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    # A normal float32 is a power of two where its 23 bits of fraction are zero.
    bits = scale.view(torch.int32) + 0x7FFFFF
    return (bits & 0x7F800000).view(torch.float32)


def _scaled(values: torch.Tensor, scale: torch.Tensor, largest: Any = E4M3_MAX) -> torch.Tensor:
    return (values / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)

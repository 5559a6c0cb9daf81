"""The engines' form of this rank's shards: quantized, or dequantized again, without other ranks' weights.

If several shards share a scale (a 128 x 128 block cut by tensor parallelism, a row cut into columns, one scale per
tensor), ranks first agree on the largest magnitudes, a few numbers per scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.fp8 import BLOCK, Fp8Format
from posttrain.errors import CheckpointError
from posttrain.rl.algorithm.finite import are_finite
from posttrain.rl.megatron_backend.plain_data import gather_plain
from posttrain.rl.megatron_backend.ranks import largest_of_ranks
from posttrain.rl.megatron_backend.weights import DTYPES, HubWeights, Shard
from posttrain_weights.box import Box, box_at

# Most tensor names in an error message.
MAX_NAMED = 5
# Elements that are computed together. An operation on a smaller matrix costs more to start than to run, so small
# matrices of one shape are stacked.
TOGETHER_ELEMENTS = 1 << 19
Magnitudes = Mapping[str, torch.Tensor]
# Codes and scales of a part; scales None: the values are not codes.
Computed = tuple[torch.Tensor, torch.Tensor | None]
T = TypeVar("T")


class ServedPart(NamedTuple):
    """A box of a tensor that engines load.

    Args:
        name: Tensor name; codes and scales have one each.
        box: Its place in the tensor.
        values: [rows, columns].
    """

    name: str
    box: Box
    values: torch.Tensor

    def cut(self, box: Box) -> ServedPart:
        """Return the part within a box."""
        row, column, rows, columns = box.within(self.box)
        return ServedPart(self.name, box, self.values[row : row + rows, column : column + columns])


class ServedValues:
    """Computes the engines' form of this rank's shards; construction is collective.

    Args:
        weights: The trainer's weights under Hub names.
        served: The format that engines serve; None for the Hub's own precision.
        narrowed: Ends of the names that engines hold in BF16 although the Hub has them in FP32.
    """

    def __init__(self, weights: HubWeights, served: Fp8Format | None, narrowed: tuple[str, ...] = ()):
        self._weights, self._served = weights, served
        self._specs = {
            name: replace(spec, dtype="BF16") if narrowed and name.endswith(narrowed) else spec
            for name, spec in weights.specs.items()
        }
        self.shards = weights.shards
        mine = dict.fromkeys(shard.hf_name for shard in self.shards if self._shares_scales(shard))
        self._agreed_on = sorted({name for names in gather_plain([*mine]) for name in names})

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hub shapes of all tensors of which any rank holds a part."""
        return {name: spec.shape for name, spec in self._specs.items()}

    @cached_property
    def sent_specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of all tensors that engines load."""
        sent: dict[str, TensorSpec] = {}
        for name, spec in self._specs.items():
            served = self._format_of(name)
            sent |= served.served_specs(name, spec) if served else {name: spec}
        return sent

    @cached_property
    def holders(self) -> dict[str, dict[Box, list[int]]]:
        """Ranks that can compute each part of the tensors that engines load: name -> part -> ranks."""
        found: dict[str, dict[Box, list[int]]] = {}
        for name, held in self._weights.holders.items():
            for rank, where in held:
                for sent, box in self.boxes(name, where):
                    found.setdefault(sent, {}).setdefault(box, []).append(rank)
        return found

    def differ(self, shard: Shard) -> bool:
        """Return whether engines may hold other numbers than the trainer for a shard."""
        return self._format_of(shard.hf_name) is not None or shard.values.dtype != self._dtype(shard.hf_name)

    def of(self, shard: Shard, magnitudes: Magnitudes) -> torch.Tensor:
        """Return a shard's numbers on engines: codes times scales in fp32, or the shard in the Hub's precision.

        Args:
            shard: One of `shards`.
            magnitudes: See `agreed_magnitudes`.
        """
        values, _ = self._computed([shard], magnitudes, as_codes=False)[0]
        return values

    def parts(self, shards: Sequence[Shard], magnitudes: Magnitudes, as_codes: bool = True) -> Iterator[ServedPart]:
        """Yield the engine tensors of shards: codes, and scales that no other shard yields; or the shard itself.

        Args:
            shards: Some of `shards`.
            magnitudes: See `agreed_magnitudes`.
            as_codes: False: yield dequantized numbers instead of codes and scales.
        """
        for some in _limited(shards, lambda shard: shard.values.numel()):
            for shard, (values, scales) in zip(some, self._computed(some, magnitudes, as_codes), strict=True):
                yield from self._parts_of(shard, values, scales)

    def _parts_of(self, shard: Shard, values: torch.Tensor, scales: torch.Tensor | None) -> Iterator[ServedPart]:
        """Yield the engine tensors of a shard from what `_computed` returned for it."""
        if scales is None:
            yield _part(shard.hf_name, shard.corner, values)
            return
        served, origin = self._format_of(shard.hf_name), self._scales(shard.where)
        assert served is not None, shard.hf_name
        corner = tuple(axis.start for axis in origin) + (0,) * (2 - len(origin))
        made = {shard.hf_name: _part(shard.hf_name, shard.corner, values)}
        made |= {(name := shard.hf_name + served.scale_suffix): _part(name, corner, scales)}
        for name, box in self.boxes(shard.hf_name, shard.where):
            yield made[name].cut(box)

    def _computed(self, shards: Sequence[Shard], magnitudes: Magnitudes, as_codes: bool) -> list[Computed]:
        """Return the engines' form of each shard; small quantized ones of one shape and offset are stacked."""
        made: dict[int, Computed] = {}
        alike = defaultdict[tuple[object, ...], list[int]](list)
        for number, shard in enumerate(shards):
            name, agreed = shard.hf_name, self._agreed(shard, magnitudes)
            if self._format_of(name) is None:
                made[number] = self._values(shard), None
            elif agreed is not None or shard.values.numel() > TOGETHER_ELEMENTS:
                made[number] = self._quantized(self._values(shard), shard.corner, agreed, as_codes)
            else:
                alike[shard.values.shape, self._dtype(name), shard.corner].append(number)
        for numbers in alike.values():
            stack = torch.stack([self._values(shards[number]) for number in numbers])
            values, scales = self._quantized(stack, shards[numbers[0]].corner, None, as_codes)
            made |= {number: (values[i], None if scales is None else scales[i]) for i, number in enumerate(numbers)}
        return [made[number] for number in range(len(shards))]

    def _quantized(
        self, values: torch.Tensor, corner: tuple[int, ...], agreed: torch.Tensor | None, as_codes: bool
    ) -> Computed:
        """Return codes and scales of a part, or of a stack of parts; or what engines compute with."""
        assert self._served is not None
        if as_codes:
            return self._served.quantize_part(values, corner, agreed)
        return served_part(self._served, values, corner, agreed), None

    def _values(self, shard: Shard) -> torch.Tensor:
        """Return a shard in the Hub's precision."""
        return shard.values.to(self._dtype(shard.hf_name))

    def boxes(self, name: str, where: tuple[slice, ...]) -> Iterator[tuple[str, Box]]:
        """Yield name and box of every part that `parts` yields as codes for a part of a tensor.

        Args:
            name: Name of the tensor.
            where: Index of the part in the tensor.
        """
        box = box_at([axis.start for axis in where], [axis.stop - axis.start for axis in where])
        yield name, box
        served = self._format_of(name)
        if served and (own := _scales_that_begin(served.strategy, box)):
            yield name + served.scale_suffix, own

    def gather(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the tensors that engines load, FP8 codes and scales or unquantized tensors; collective.

        Yields:
            (name, whole tensor) on rank 0, (name, None) elsewhere; scales after their codes.

        Raises:
            CheckpointError: A quantized weight is NaN or infinite; raised on rank 0.
        """
        magnitudes = self.agreed_magnitudes()
        for names in _limited(self._weights.names, lambda name: math.prod(self._specs[name].shape)):
            yield from self._gather_some(names, magnitudes)

    @torch.no_grad()
    def _gather_some(self, names: Sequence[str], magnitudes: Magnitudes) -> list[tuple[str, torch.Tensor | None]]:
        """Return the tensors that `gather` yields for some names; collective."""
        shards = [shard for name in names for shard in self._weights.main_shards(name)]
        made = defaultdict[str, list[Computed]](list)
        for shard, computed in zip(shards, self._computed(shards, magnitudes, as_codes=True), strict=True):
            made[shard.hf_name].append(computed)
        return [joined for name in names for joined in self._joined(name, made[name])]

    def _joined(self, name: str, parts: Sequence[Computed]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield a tensor, or its codes and scales, joined from those of all ranks; see `gather`."""
        spec, served = self._specs[name], self._format_of(name)
        if served is None:
            yield name, self._weights.join(name, [values for values, _ in parts], spec.shape, self._dtype(name))
            return
        # No communication library supports FP8.
        octets = [codes.view(torch.uint8) for codes, _ in parts]
        whole = self._weights.join(name, octets, spec.shape, torch.uint8)
        yield name, None if whole is None else whole.view(torch.float8_e4m3fn)
        scales = [scale for _, scale in parts if scale is not None]
        scale = self._weights.join(name, scales, self._scale_spec(name).shape, torch.float32, self._scales)
        if scale is not None and not torch.isfinite(scale).all():
            words = f"{name}: holds NaN or infinity; weights must be finite to be quantised"
            raise CheckpointError("values-not-finite", words)
        yield name + served.scale_suffix, scale

    @torch.no_grad()
    def agreed_magnitudes(self) -> Magnitudes:
        """Return the maximum magnitudes for scales that several shards share, for the current weights; collective.

        Raises:
            CheckpointError: Such a tensor is NaN or infinite on any rank; raised on all ranks.
        """
        if not self._agreed_on:
            return {}
        shapes = [self._scale_spec(name).shape for name in self._agreed_on]
        together = torch.zeros(sum(map(math.prod, shapes)), device=self.shards[0].values.device)
        parts = together.split([math.prod(shape) for shape in shapes])
        found = {n: part.view(s) for n, part, s in zip(self._agreed_on, parts, shapes, strict=True)}
        for shard in (shard for shard in self.shards if shard.hf_name in found):
            served = self._format_of(shard.hf_name)
            assert served is not None, shard.hf_name
            here = found[shard.hf_name][self._scales(shard.where)]
            here.copy_(torch.maximum(here, served.magnitudes(self._values(shard), shard.corner)))
        together.copy_(largest_of_ranks(together))
        if not are_finite(together):
            wrong = [name for name, magnitudes in found.items() if not magnitudes.isfinite().all()]
            names = ", ".join(wrong[:MAX_NAMED]) + (", ..." if wrong[MAX_NAMED:] else "")
            remedy = "lower optimizer.lr or optimizer.clip_grad in a fork of the last good step (fork=RUN@STEP)"
            words = "holds NaN or infinity; weights must be finite to be quantised, so nothing was sent"
            raise CheckpointError("values-not-finite", f"{names}: {words}; {remedy}")
        return {name: self._of_joined(name, found) for name in found}

    def _of_joined(self, name: str, found: Magnitudes) -> torch.Tensor:
        """Return a tensor's magnitudes; with one scale per tensor, those of all matrices that engines fuse with it."""
        assert self._served is not None
        joined = [found[other] for other in self._served.sharing_scale(name) if other in found]
        return torch.stack(joined).amax(0) if joined else found[name]

    def _shares_scales(self, shard: Shard) -> bool:
        """Return whether a shard may share a scale with another shard."""
        served = self._format_of(shard.hf_name)
        if served is None:
            return False
        whole = self._specs[shard.hf_name].shape
        if served.strategy != "block":
            return served.strategy == "tensor" or shard.values.shape[1] < whole[1]
        ends = [(axis.start, axis.stop, size) for axis, size in zip(shard.where, whole, strict=True)]
        return any(start % BLOCK or (stop % BLOCK and stop < size) for start, stop, size in ends)

    def _agreed(self, shard: Shard, magnitudes: Magnitudes) -> torch.Tensor | None:
        agreed = magnitudes.get(shard.hf_name)
        return None if agreed is None else agreed[self._scales(shard.where)]

    def _scales(self, where: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the index, in a tensor's scales, of the scales of a part."""
        rows, columns = where
        strategy = self._served.strategy if self._served else ""
        if strategy == "block":
            return tuple(slice(axis.start // BLOCK, -(-axis.stop // BLOCK)) for axis in (rows, columns))
        return (rows,) if strategy == "channel" else ()

    def _scale_spec(self, name: str) -> TensorSpec:
        assert self._served is not None, name
        return self.sent_specs[name + self._served.scale_suffix]

    @cached_property
    def _quantized_names(self) -> frozenset[str]:
        if self._served is None:
            return frozenset()
        includes = self._served.selection.includes
        return frozenset(name for name, spec in self._specs.items() if includes(name, spec.shape))

    def _format_of(self, name: str) -> Fp8Format | None:
        return self._served if name in self._quantized_names else None

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._specs[name].dtype]


def _part(name: str, corner: tuple[int, ...], values: torch.Tensor) -> ServedPart:
    box = box_at(corner, values.shape)
    return ServedPart(name, box, values.reshape(box.rows, box.columns))


def _limited(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield consecutive items until their sizes add up to `TOGETHER_ELEMENTS`."""
    some, total = list[T](), 0
    for item in items:
        some.append(item)
        total += size(item)
        if total >= TOGETHER_ELEMENTS:
            yield some
            some, total = [], 0
    if some:
        yield some


def _scales_that_begin(strategy: str, box: Box) -> Box | None:
    """Return the scales whose blocks begin in a part of a matrix (each begins in only one), None if none do."""
    row, column, rows, columns = box
    if strategy == "tensor":
        return Box(0, 0, 1, 1) if row == column == 0 else None
    if strategy == "channel":
        return Box(row, 0, rows, 1) if column == 0 else None
    top, left = -(-row // BLOCK), -(-column // BLOCK)
    below, beside = -(-(row + rows) // BLOCK), -(-(column + columns) // BLOCK)
    return Box(top, left, below - top, beside - left) if below > top and beside > left else None


def served_part(
    served: Fp8Format, values: torch.Tensor, corner: tuple[int, ...], magnitudes: torch.Tensor | None
) -> torch.Tensor:
    """Return the values that an engine computes with for a part of a matrix; see `Fp8Format.served_values`."""
    return served.served_values(values, corner, magnitudes)

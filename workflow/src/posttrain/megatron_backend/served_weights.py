"""The policy computes with the numbers that engines compute with, layer by layer, and no rank needs another's weights.

Each rank takes its own shards through the quantiser and back. A layer gets the served values when its forward pass
begins, and its own ones again when it ends: besides the weights there is a copy of one layer, and no optimizer is asked
to bring them back. Scales that several shards make together (a block of 128 x 128 that tensor parallelism cuts, a row
cut into columns, a tensor's only scale) are agreed on before: largest magnitudes, a few numbers for each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.fp8 import BLOCK, Fp8Format
from posttrain.checkpoint.quantization.quantized_names import layer_of
from posttrain.megatron_backend.model import Policy
from posttrain.megatron_backend.plain_data import gather_plain
from posttrain.megatron_backend.weights import DTYPES, HubWeights, Shard

Magnitudes = Mapping[str, torch.Tensor]


class ServedWeights:
    """Lends the policy the weights that are served; making it is collective.

    Args:
        policy: What is trained.
        weights: Its weights under Hub names.
        served: What engines serve; None for the Hub's own precision.
    """

    def __init__(self, policy: Policy, weights: HubWeights, served: Fp8Format | None):
        self._policy, self._served, self._specs = policy, served, weights.specs
        # By layer; None has the embedding, the last norm and the output matrix.
        self._changing: dict[int | None, list[Shard]] = defaultdict(list)
        for shard in weights.shards():
            if self._format_of(shard.hf_name) or shard.values.dtype != self._dtype(shard.hf_name):
                self._changing[layer_of(shard.hf_name)].append(shard)
        mine = [s.hf_name for shards in self._changing.values() for s in shards if self._shares_scales(s)]
        self._agreed_on = sorted({name for names in gather_plain([*dict.fromkeys(mine)]) for name in names})

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let forward passes compute with them, without gradients; collective. Own weights come back bit for bit."""
        for chunk in self._policy.wrapped:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # Otherwise a forward pass gathers what data-parallel ranks hold at different times.
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        magnitudes = self._agreed_magnitudes()
        with ExitStack() as stack, torch.no_grad():
            stack.callback(self._lend(None, magnitudes))
            for chunk in self._policy.chunks:
                for layer in chunk.decoder.layers:
                    _around_forward(layer, partial(self._lend, layer.layer_number - 1, magnitudes), stack)
            yield

    def _lend(self, layer: int | None, magnitudes: Magnitudes) -> Callable[[], None]:
        """Overwrite a layer's weights; returns what puts them back."""
        shards = self._changing.get(layer, [])
        own = [shard.values.clone() for shard in shards]
        for shard in shards:
            shard.values.copy_(self._value(shard, magnitudes))

        def give_back() -> None:
            for shard, values in zip(shards, own, strict=True):
                shard.values.copy_(values)
            own.clear()

        return give_back

    def _value(self, shard: Shard, magnitudes: Magnitudes) -> torch.Tensor:
        values, served = shard.values.to(self._dtype(shard.hf_name)), self._format_of(shard.hf_name)
        if served is None:
            return values
        agreed = magnitudes.get(shard.hf_name)
        return served_part(served, values, shard.corner, None if agreed is None else agreed[self._scales(shard)])

    def _agreed_magnitudes(self) -> Magnitudes:
        """Return what makes the scales of tensors whose shards share them."""
        if not self._agreed_on:
            return {}
        shapes = [self._scale_spec(name).shape for name in self._agreed_on]
        together = torch.zeros(sum(map(math.prod, shapes)), device=self._policy.device)
        parts = together.split([math.prod(shape) for shape in shapes])
        found = {n: part.view(s) for n, part, s in zip(self._agreed_on, parts, shapes, strict=True)}
        for shard in (shard for shards in self._changing.values() for shard in shards if shard.hf_name in found):
            served = self._format_of(shard.hf_name)
            assert served is not None, shard.hf_name
            here = found[shard.hf_name][self._scales(shard)]
            values = shard.values.to(self._dtype(shard.hf_name))
            here.copy_(torch.maximum(here, served.magnitudes(values, shard.corner)))
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return {name: self._of_joined(name, found) for name in found}

    def _of_joined(self, name: str, found: Magnitudes) -> torch.Tensor:
        """Return a tensor's magnitudes, or with one scale for all those of the matrices that engines join with it."""
        assert self._served is not None
        joined = [found[other] for other in self._served.sharing_scale(name) if other in found]
        return torch.stack(joined).amax(0) if joined else found[name]

    def _shares_scales(self, shard: Shard) -> bool:
        """Tell whether a scale of a shard's may be another shard's as well."""
        served = self._format_of(shard.hf_name)
        if served is None:
            return False
        if served.strategy != "block":
            return served.strategy == "tensor" or shard.values.shape[1] < self._specs[shard.hf_name].shape[1]
        whole = self._specs[shard.hf_name].shape
        ends = [(axis.start, axis.stop, size) for axis, size in zip(shard.where, whole, strict=True)]
        return any(start % BLOCK or (stop % BLOCK and stop < size) for start, stop, size in ends)

    def _scales(self, shard: Shard) -> tuple[slice, ...]:
        """Return how to index a tensor's scales so as to get a shard's."""
        rows, columns = shard.where
        strategy = self._served.strategy if self._served else ""
        if strategy == "block":
            return tuple(slice(axis.start // BLOCK, -(-axis.stop // BLOCK)) for axis in (rows, columns))
        return (rows,) if strategy == "channel" else ()

    def _scale_spec(self, name: str) -> TensorSpec:
        served = self._format_of(name)
        assert served is not None, name
        return served.served_specs(name, self._specs[name])[name + served.scale_suffix]

    def _format_of(self, name: str) -> Fp8Format | None:
        return self._served if self._served and self._served.selection.includes(name, self._specs[name].shape) else None

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._specs[name].dtype]


def served_part(
    served: Fp8Format, values: torch.Tensor, corner: tuple[int, ...], magnitudes: torch.Tensor | None
) -> torch.Tensor:
    """Return what an engine computes with for a part of a matrix; see `Fp8Format.served_values`."""
    return served.served_values(values, corner, magnitudes)


def _around_forward(layer: torch.nn.Module, lend: Callable[[], Callable[[], None]], stack: ExitStack) -> None:
    """Lend a layer its served weights in each forward pass from now on, until the stack is left."""
    lent: list[Callable[[], None]] = []

    def before(*_: object) -> None:
        lent.append(lend())

    def after(*_: object) -> None:
        if lent:
            lent.pop()()

    stack.callback(after)
    stack.callback(layer.register_forward_pre_hook(before).remove)
    stack.callback(layer.register_forward_hook(after, always_call=True).remove)

"""The weights an engine serves, under their Hub names.

`transformers` keeps a layer's experts in two fused tensors; the Hub has three matrices per expert. A Hub tensor is
therefore a view into a model parameter. `views_by_hub_name` is the one table of these views, used for loading,
updates and checksums.

There are two sets of tensors: the serving set and a spare set of the same shapes. A `WeightUpdate` fills the spare
set and is refused as a whole if any tensor is missing, unknown or of another shape. `ServedWeights.serve` swaps
the two.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.checkpoint.quantization.fp8 import BLOCK, SCALE_SUFFIXES, dequantize
from posttrain.rl.engines.checksums import tensor_checksum
from posttrain_weights.box import whole_box
from posttrain_weights.digest import Digester, as_text, together
from posttrain_weights.engine_handlers import pack, type_of

log = logging.getLogger(__name__)

# Start of the decoder's names in transformers' classes of texts.
TEXT_PREFIX = "model."
FUSED_GATE_UP, FUSED_DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class WeightError(ValueError):
    """Weights that do not fit the model; the text names the tensors."""


class ServedWeights:
    """The serving weights of a model, and the spare set for updates.

    Args:
        model: A `transformers` model; its parameters and persistent buffers are served.
        ignored: Starts of names that a checkpoint may hold and the engine ignores: MTP layers and vision tower.
        text_prefix: Start of the decoder's tensor names on the Hub.
    """

    def __init__(self, model: torch.nn.Module, ignored: tuple[str, ...], text_prefix: str = TEXT_PREFIX):
        named = model.state_dict(keep_vars=True)
        firsts = {id(tensor): name for name, tensor in reversed(named.items())}
        self._served = {name: tensor for name, tensor in named.items() if firsts[id(tensor)] == name}
        # A tied output matrix is served with the embedding; a checkpoint may still contain it.
        self._copies = named.keys() - self._served.keys()
        self._spare: dict[str, torch.Tensor] | None = None
        self._ignored, self._text_prefix = ignored, text_prefix
        self._sizes: dict[str, int] = {}  # size in bytes of the released serving set
        self.version: str | None = None
        self.is_whole = True

    @property
    def num_bytes(self) -> int:
        """Size of the serving set in bytes."""
        return sum(tensor.nbytes for tensor in self._served.values())

    def initial_load(self) -> WeightUpdate:
        """Return an update that fills the serving set in place, for the initial load."""
        return WeightUpdate(self._served, self._ignored, self._copies, self._text_prefix)

    def begin_update(self) -> WeightUpdate:
        """Return an update that fills the spare set, or the serving set if it holds no weights yet."""
        if self._sizes:
            raise WeightError("the weights' memory is released; call /resume_memory_occupation first")
        if not self.is_whole:
            return self.initial_load()
        if self._spare is None:
            self._spare = {name: torch.empty_like(tensor.data) for name, tensor in self._served.items()}
        return WeightUpdate(self._spare, self._ignored, self._copies, self._text_prefix)

    def serve(self, update: WeightUpdate, version: str | None) -> None:
        """Serve a complete update. Call it while no batch runs.

        Raises:
            WeightError: The update is incomplete; the serving weights are untouched.
        """
        update.require_complete()
        if update.tensors is self._spare:
            for name, tensor in self._served.items():
                tensor.data, self._spare[name] = self._spare[name], tensor.data
        self.is_whole = True
        self.version = version if version is not None else self.version

    def release(self) -> None:
        """Free both sets and their weights. Call it while no batch runs."""
        self._spare, self.is_whole = None, False
        for name, tensor in self._served.items():
            storage = tensor.untyped_storage()
            self._sizes.setdefault(name, storage.nbytes())
            storage.resize_(0)

    def resume(self) -> None:
        """Allocate the serving set again; an update must fill it."""
        for name, size in self._sizes.items():
            self._served[name].untyped_storage().resize_(size)
            self._served[name].data.zero_()
        self._sizes = {}

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every served tensor, in the engine's compute form, by Hub name."""
        return {name: tensor_checksum(view) for name, view in self._views().items()}

    def parts(self, tensors: Sequence[Sequence[Any]]) -> str:
        """List the held tensors, each whole; see `posttrain_weights.engine_handlers.parts`."""
        index, views = {name: number for number, (name, _, _) in enumerate(tensors)}, self._views()
        unknown = sorted(views.keys() - index.keys())
        found = [[index[name], *whole_box(view.shape), type_of(view)] for name, view in views.items() if name in index]
        return pack({"parts": found, "derived": unknown})

    def digest(self, key: str) -> str:
        """Return one digest of all parts; see `posttrain_weights.engine_handlers.digest`."""
        return as_text(together(self._digests(key), bytes.fromhex(key)))

    def digests(self, key: str) -> str:
        """Return the digests of all parts; see `posttrain_weights.engine_handlers.digests`."""
        return pack([as_text(found) for found in self._digests(key)])

    def _digests(self, key: str) -> torch.Tensor:
        views = [*self._views().values()]
        return Digester.of_parts(bytes.fromhex(key), views, [(0, 0)] * len(views))

    def _views(self) -> dict[str, torch.Tensor]:
        return views_by_hub_name(self._served, self._text_prefix)


@dataclass
class WeightUpdate:
    """A weight update in progress.

    Args:
        tensors: The tensors to fill, by the model's names.
        ignored: Starts of the names of tensors that are counted but ignored.
        copies: Names of tensors tied to others of the model; also ignored.
        text_prefix: Start of the decoder's tensor names on the Hub.
    """

    tensors: Mapping[str, torch.Tensor]
    ignored: tuple[str, ...]
    copies: Collection[str] = ()
    text_prefix: str = TEXT_PREFIX
    num_skipped: int = 0
    version: str | None = None
    _views: dict[str, torch.Tensor] = field(init=False)
    _received: set[str] = field(init=False, default_factory=set)
    _failure: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._views = views_by_hub_name(self.tensors, self.text_prefix)

    @torch.no_grad()
    def add(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Receive tensors; a quantised weight and its scales must come in the same call.

        Raises:
            WeightError: A tensor is unknown, of another shape, or lacks its scales; the update can then not be served.
        """
        bucket = dict(named_tensors)
        try:
            for name in bucket:
                self._add(name, bucket)
        except WeightError as error:
            self._failure = str(error)
            raise

    def require_complete(self) -> None:
        """Raise `WeightError` unless every tensor of the model has been received."""
        if self._failure:
            raise WeightError(f"the update failed before: {self._failure}")
        missing = sorted(self._views.keys() - self._received)
        if missing:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightError(f"{len(missing)} of {len(self._views)} tensors are missing: {listed}")

    def _add(self, name: str, bucket: Mapping[str, torch.Tensor]) -> None:
        view = self._views.get(name)
        if view is None and (name.startswith(self.ignored) or name in self.copies):
            self.num_skipped += 1
            return
        if suffix := next((suffix for suffix in SCALE_SUFFIXES if name.endswith(suffix)), ""):
            if name.removesuffix(suffix) not in bucket:
                raise WeightError(f"{name}: came without {name.removesuffix(suffix)}")
            return
        if view is None:
            raise WeightError(f"{name}: the model has no such tensor")
        tensor = _in_full_precision(name, bucket)
        if tensor.shape != view.shape:
            raise WeightError(f"{name}: shape {tuple(tensor.shape)}, the model's is {tuple(view.shape)}")
        view.copy_(tensor)
        self._received.add(name)


def views_by_hub_name(tensors: Mapping[str, torch.Tensor], text_prefix: str = TEXT_PREFIX) -> dict[str, torch.Tensor]:
    """Return a view of every tensor of the model under its Hub name.

    Args:
        tensors: By the model's names; `...experts.gate_up_proj` [E, 2F, H] holds gate rows, then up rows, per
            expert, and `...experts.down_proj` is [E, H, F].
        text_prefix: Start of the decoder's tensor names on the Hub.
    """
    views: dict[str, torch.Tensor] = {}
    for own_name, tensor in tensors.items():
        name, data = own_name, tensor.data
        if name.startswith(TEXT_PREFIX):
            name = text_prefix + name.removeprefix(TEXT_PREFIX)
        if name.endswith(FUSED_GATE_UP):
            for expert, (gate, up) in enumerate(zip(*data.chunk(2, dim=1), strict=True)):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
                views[f"{prefix}.gate_proj.weight"], views[f"{prefix}.up_proj.weight"] = gate, up
        elif name.endswith(FUSED_DOWN):
            prefix = name.removesuffix("down_proj")
            views |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(data)}
        else:
            views[name] = data
    return views


def _in_full_precision(name: str, bucket: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor dequantized (code * scale), or unchanged if it is not quantised."""
    tensor = bucket[name]
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    scale = next((bucket[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in bucket), None)
    if scale is None:
        raise WeightError(f"{name}: quantised, and {name + SCALE_SUFFIXES[0]} is not beside it")
    blocks = tuple(-(-size // BLOCK) for size in tensor.shape)
    if tensor.dim() != 2 or tuple(scale.shape) not in (blocks, (tensor.shape[0], 1), ()):
        found = f"scales of shape {tuple(scale.shape)} for codes of shape {tuple(tensor.shape)}"
        raise WeightError(f"{name}: {found}, expected {blocks}")
    return dequantize(tensor, scale)

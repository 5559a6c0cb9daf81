"""The trainer's weights under Hub names, for any layout: gathered as whole tensors, or as a rank's shards.

Megatron's sharded state gives each local tensor's place in the whole (key, offset, shape); the table of parameter names
maps parts of a whole to Hub tensors. So this module needs no knowledge of TP, EP or PP.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import Placement, expected_tensors, to_megatron
from posttrain.checkpoint.quantization.tiling import Chunk, intersect, slices_within
from posttrain.config.schema import Architecture
from posttrain.rl.megatron_backend.checkpoint import sharded_weights
from posttrain.rl.megatron_backend.glm5.model import LogprobModel
from posttrain.rl.megatron_backend.plain_data import gather_plain

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a Megatron tensor that one rank holds.

    Args:
        key: Name of the whole tensor.
        offset: Offset of the part per axis of the whole.
        shape: Its extent per axis of the whole.
        rank: The rank that holds it.
        is_main: This rank is the part's main holder; the others are replicas.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    is_main: bool


@dataclass(frozen=True)
class Shard:
    """A rank's part of a Hub tensor.

    Args:
        hf_name: Name on the Hub.
        corner: Its offset in each axis of the Hub tensor.
        values: View into the parameter with the same number of axes: writing to it changes the model.
        is_main: This rank is the part's main holder; the others are replicas.
    """

    hf_name: str
    corner: tuple[int, ...]
    values: torch.Tensor
    is_main: bool

    @property
    def where(self) -> tuple[slice, ...]:
        """Index of the shard in the Hub tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.corner, self.values.shape, strict=True))


class HubWeights:
    """The model's weights under Hub names; construction is collective.

    Args:
        chunks: This rank's part of the model.
        architecture: Dimensions, for the table of names.
    """

    def __init__(self, chunks: Sequence[LogprobModel], architecture: Architecture):
        self._local = _local_pieces(chunks)
        everybody = itertools.chain(*gather_plain([astuple(piece) for piece in self._local]))
        pieces = [Piece(key, tuple(offset), tuple(shape), *whose) for key, offset, shape, *whose in everybody]
        keys, specs = {piece.key for piece in pieces}, expected_tensors(architecture)
        placed = [placement for placement in to_megatron(architecture) if placement.key in keys]
        nameless = keys - {placement.key for placement in placed}
        assert not nameless, f"weights without a Hub name: {sorted(nameless)}"
        self._specs = {placement.hf_name: specs[placement.hf_name] for placement in placed}
        self._gathered = [*self._specs]
        self._device = next(iter(self._local.values())).device
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for name, piece, in_piece, corner in _parts_of(placed, self._local):
            values = self._local[piece][in_piece]
            view = values[(0,) * (values.dim() - len(corner))]
            self._shards[name].append(Shard(name, corner, view, piece.is_main))
        self._placed, self._pieces = placed, pieces
        # On rank 0: the parts that other ranks send, in each rank's sending order.
        self._sources: dict[str, list[tuple[int, tuple[slice, ...]]]] = defaultdict(list)
        if dist.get_rank() == 0:
            others = [piece for piece in pieces if piece.is_main and piece.rank != 0]
            for name, piece, where in _placed_parts(placed, others):
                self._sources[name].append((piece.rank, where))

    @property
    def parts(self) -> dict[Piece, torch.Tensor]:
        """This rank's parts, as views into the parameters."""
        return self._local

    @property
    def names(self) -> list[str]:
        """Hub names of all gathered tensors, in checkpoint order."""
        return self._gathered

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Hub shape and dtype of all tensors of which any rank holds a part."""
        return self._specs

    @property
    def shards(self) -> list[Shard]:
        """This rank's shards of Hub tensors, in checkpoint order."""
        return [*itertools.chain(*self._shards.values())]

    @cached_property
    def holders(self) -> dict[str, list[tuple[int, tuple[slice, ...]]]]:
        """Holders of each Hub tensor's parts, including replicas, by name: (rank, index of the part)."""
        found: dict[str, list[tuple[int, tuple[slice, ...]]]] = defaultdict(list)
        for name, piece, where in _placed_parts(self._placed, self._pieces):
            found[name].append((piece.rank, where))
        return found

    def leave_only(self, names: Set[str]) -> None:
        """Gather only these tensors from now on; call it with the same names on all ranks."""
        self._gathered = [name for name in self._gathered if name in names]

    @torch.no_grad()
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield (name, whole tensor) on rank 0, (name, None) elsewhere; collective.

        Args:
            dtype: Precision; by default that of the Hub checkpoint, which may differ between tensors.
        """
        for name in self._gathered:
            spec = self._specs[name]
            width = dtype or DTYPES[spec.dtype]
            parts = [shard.values.to(width) for shard in self.main_shards(name)]
            yield name, self.join(name, parts, spec.shape, width)

    def main_shards(self, name: str) -> list[Shard]:
        """Return the shards of a tensor of which this rank is the main holder."""
        return [shard for shard in self._shards.get(name, ()) if shard.is_main]

    def join(
        self,
        name: str,
        parts: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Callable[[tuple[slice, ...]], tuple[slice, ...]] = lambda where: where,
    ) -> torch.Tensor | None:
        """Join tensors that ranks computed from their parts: the whole on rank 0, None elsewhere; collective.

        Args:
            name: Name of the tensor on the Hub.
            parts: One for each of `main_shards`.
            shape: Shape of the whole.
            dtype: Precision of the parts.
            place: Maps the index of a part in the tensor to its index in the whole.
        """
        if dist.get_rank() != 0:
            for part in parts:
                dist.send(part.contiguous(), dst=0)
            return None
        sources = self._sources.get(name, ())
        if not sources and [part.shape for part in parts] == [torch.Size(shape)]:
            return parts[0].clone(memory_format=torch.contiguous_format)
        whole = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        for shard, part in zip(self.main_shards(name), parts, strict=True):
            whole[place(shard.where)] = part
        for rank, where in sources:
            received = torch.empty_like(whole[place(where)], memory_format=torch.contiguous_format)
            dist.recv(received, src=rank)
            whole[place(where)] = received
        return whole


Parts = Iterator[tuple[str, Piece, tuple[slice, ...], tuple[int, ...]]]


def _parts_of(placed: Sequence[Placement], pieces: Iterable[Piece]) -> Parts:
    """Yield (Hub name, piece, slices of the piece, their offset in the Hub tensor), in checkpoint order.

    Pieces of stacked tensors are looked up by first index: one tensor stacks hundreds of a layer's experts.
    """
    stacked = {placement.key for placement in placed if placement.num_stack_axes}
    found: dict[tuple[str, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        first = range(piece.offset[0], piece.offset[0] + piece.shape[0]) if piece.key in stacked else (0,)
        for index in first:
            found[piece.key, index].append(piece)
    for placement in placed:
        for box, rows in placement.chunks:
            for piece in found.get((placement.key, box[0][0] if placement.key in stacked else 0), ()):
                if overlap := _overlap(piece, box):
                    in_piece, in_chunk = overlap
                    first_axis, *others = in_chunk[placement.num_stack_axes :]
                    corner = (rows.start + first_axis.start, *(axis.start for axis in others))
                    yield placement.hf_name, piece, in_piece, corner


def _placed_parts(
    placed: Sequence[Placement], pieces: Iterable[Piece]
) -> Iterator[tuple[str, Piece, tuple[slice, ...]]]:
    """Yield (Hub name, piece, index of the piece in the Hub tensor)."""
    for name, piece, in_piece, corner in _parts_of(placed, pieces):
        sizes = (axis.stop - axis.start for axis in in_piece[len(in_piece) - len(corner) :])
        yield name, piece, tuple(slice(start, start + size) for start, size in zip(corner, sizes, strict=True))


def _local_pieces(chunks: Sequence[LogprobModel]) -> dict[Piece, torch.Tensor]:
    """Return this rank's parts as views into the parameters; writing to them changes the model."""
    state = sharded_weights(chunks)
    apply_factories(state)
    pieces = {}
    for tensor in nested_values(state):
        assert isinstance(tensor, ShardedTensor), f"not a plain shard: {tensor}"
        assert tensor.data is not None, f"no data: {tensor}"
        shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        is_main = set(tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id,)) == {0}
        piece = Piece(tensor.key, tuple(tensor.global_offset), shape, dist.get_rank(), is_main)
        pieces[piece] = tensor.data.detach().view(shape)
    return pieces


def _overlap(piece: Piece, box: Chunk) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of piece and box as slices into each; None if they are disjoint."""
    held = (piece.offset, piece.shape)
    shared = intersect(held, box)
    return (slices_within(shared, held), slices_within(shared, box)) if shared else None

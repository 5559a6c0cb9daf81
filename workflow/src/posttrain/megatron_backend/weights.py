"""The trainer's weights under Hub names, whatever the layout: gathered whole for the engines, or what a rank holds.

Megatron's own sharded state tells where each local tensor lies in the whole (key, offset, shape); the table of
parameter names tells which part of a whole is one Hub tensor. Nothing here knows about TP, EP or PP.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import Placement, expected_tensors, to_megatron
from posttrain.checkpoint.quantization.tiling import Box, intersect, slices_within
from posttrain.config.schema import Architecture
from posttrain.megatron_backend.checkpoint import sharded_weights
from posttrain.megatron_backend.glm5.model import LogprobModel
from posttrain.megatron_backend.plain_data import gather_plain

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a Megatron tensor that one rank holds.

    Args:
        key: Name of the whole tensor.
        offset: Where the part begins, per axis of the whole.
        shape: Its extent, per axis of the whole.
        rank: Who holds it.
        is_main: One holder of each part speaks for it; the others are replicas.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    is_main: bool


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a Hub tensor.

    Args:
        hf_name: Name on the Hub.
        corner: Where it begins, in each axis of the Hub's tensor.
        values: View into the parameter, as many axes: writing to it changes the model.
        is_main: One holder of each part speaks for it; the others are replicas.
    """

    hf_name: str
    corner: tuple[int, ...]
    values: torch.Tensor
    is_main: bool

    @property
    def where(self) -> tuple[slice, ...]:
        """How to index the Hub's tensor so as to get it."""
        return tuple(slice(start, start + size) for start, size in zip(self.corner, self.values.shape, strict=True))


class HubWeights:
    """The model's weights under Hub names; making it is collective.

    Args:
        chunks: This rank's part of the model.
        architecture: Dimensions, for the table of names.
    """

    def __init__(self, chunks: Sequence[LogprobModel], architecture: Architecture):
        self._local = _local_pieces(chunks)
        self._pieces: dict[str, list[Piece]] = {}
        for key, offset, shape, rank, is_main in itertools.chain(*gather_plain([astuple(p) for p in self._local])):
            self._pieces.setdefault(key, []).append(Piece(key, tuple(offset), tuple(shape), rank, is_main))
        specs = expected_tensors(architecture)
        placed = [p for p in to_megatron(architecture) if p.key in self._pieces]
        nameless = self._pieces.keys() - {placement.key for placement in placed}
        assert not nameless, f"weights without a Hub name: {sorted(nameless)}"
        self._placed = self._placements = placed
        self._dtypes = {p.hf_name: DTYPES[specs[p.hf_name].dtype] for p in placed}
        self._specs = {p.hf_name: specs[p.hf_name] for p in placed}
        self._device = next(iter(self._local.values())).device

    @property
    def parts(self) -> dict[Piece, torch.Tensor]:
        """What this rank holds, as views into the parameters."""
        return self._local

    @property
    def names(self) -> list[str]:
        """Hub names of everything the trainer holds, in checkpoint order."""
        return [placement.hf_name for placement in self._placements]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and precision on the Hub of everything that a rank holds."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank holds, in checkpoint order."""
        held: dict[str, list[Piece]] = {}
        for piece in self._local:
            held.setdefault(piece.key, []).append(piece)
        for placement in self._placed:
            for piece, (box, rows) in itertools.product(held.get(placement.key, ()), placement.chunks):
                if overlap := _overlap(piece, box):
                    in_piece, in_chunk = overlap
                    first, *others = in_chunk[placement.num_stack_axes :]
                    corner = (rows.start + first.start, *(axis.start for axis in others))
                    values = self._local[piece][in_piece][(0,) * placement.num_stack_axes]
                    yield Shard(placement.hf_name, corner, values, piece.is_main)

    def leave_only(self, names: Set[str]) -> None:
        """Gather no other tensors from now on; the same on all ranks."""
        self._placements = [placement for placement in self._placements if placement.hf_name in names]

    @torch.no_grad()
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield (name, whole tensor) on rank 0, (name, None) elsewhere; collective.

        Args:
            dtype: Precision; by default that of the Hub checkpoint, which may differ from tensor to tensor.
        """
        for placement in self._placements:
            yield placement.hf_name, self._gather_one(placement, dtype)

    def _gather_one(self, placement: Placement, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Send every main piece that overlaps the placement to rank 0, and join them there."""
        dtype = dtype or self._dtypes[placement.hf_name]
        chunks = [self._gather_box(placement.key, box, dtype) for box in placement.boxes]
        if dist.get_rank() != 0:
            return None
        joined = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return joined.reshape(self._specs[placement.hf_name].shape)

    def _gather_box(self, key: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        rank = dist.get_rank()
        chunk = torch.empty(box[1], dtype=dtype, device=self._device)
        for piece in self._pieces[key]:
            overlap = _overlap(piece, box)
            if overlap is None or not piece.is_main or rank not in (0, piece.rank):
                continue
            in_piece, in_chunk = overlap
            if piece.rank == rank:
                part = self._local[piece][in_piece].to(chunk.dtype).contiguous()
            else:
                part = torch.empty_like(chunk[in_chunk]).contiguous()
            if piece.rank != 0:
                _pass_on(part, piece.rank)
            if rank == 0:
                chunk[in_chunk] = part
        return chunk


def _local_pieces(chunks: Sequence[LogprobModel]) -> dict[Piece, torch.Tensor]:
    """Return this rank's parts as views into the parameters: writing to them changes the model."""
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


def _overlap(piece: Piece, box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where piece and box meet, as slices into each; None where they do not."""
    held = (piece.offset, piece.shape)
    shared = intersect(held, box)
    return (slices_within(shared, held), slices_within(shared, box)) if shared else None


def _pass_on(part: torch.Tensor, owner: int) -> None:
    """Move a part from its owner to rank 0."""
    if dist.get_rank() == owner:
        dist.send(part, dst=0)
    else:
        dist.recv(part, src=owner)

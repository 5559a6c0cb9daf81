"""The optimizer's state as boxes of whole tensors, so that each rank saves its state without a gather.

Megatron's distributed optimizer concatenates weights in a buffer, of which each data-parallel rank holds one run of
elements. A rank's part of a weight may start and end within a row, and consists of at most a few boxes. Elements 4 to
21 of a 4 x 6 weight:

    . . . . a a      the end of a row
    b b b b b b      whole rows
    b b b b b b
    c c c . . .      the beginning of a row

Each box is a view of the rank's own FP32 tensors. A save therefore gathers and copies nothing, every rank writes its
own part, and another layout reads the boxes that overlap its own. Keys and shapes are those of Megatron's
"fully_reshardable" format, for which Megatron itself first gathers the whole state of each rank's weights: 12 B per
parameter in host memory and whole buckets on the GPU.

Source: megatron-core 0.19.2, `core/optimizer/distrib_optimizer.py`: the runs, and `sharded_param_state_fs_model_space`,
which names them in a format that checkpoints no longer accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# Megatron's key of the FP32 master copy when it loads.
MAIN_WEIGHT = {"param": "fp32_param"}


def sharded_state(optimizer: MegatronOptimizer, weights: ShardedStateDict) -> list[ShardedTensor]:
    """Return this rank's master weights and moments as sharded tensors, to be saved or loaded in place.

    Args:
        optimizer: Has moments only after a step or `allocate_state`.
        weights: The model's sharded weights, which give the state its names and offsets.
    """
    by_weight = {named.data: named for named in weights.values()}
    return [
        piece
        for part in _parts(optimizer)
        for weight, run in _runs(part)
        for name, values in _state_of(part, weight).items()
        for piece in _pieces(by_weight[weight], run, values, f"optimizer.state.{name}")
    ]


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of this rank's optimizer: master weights and their state."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                yield weight
                yield from (value for value in part.optimizer.state.get(weight, {}).values() if torch.is_tensor(value))


def count_steps(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates that the optimizer has made."""
    groups = (group for part in _parts(optimizer) for group in part.state_dict()["optimizer"]["param_groups"])
    return max(group.get("step", 0) for group in groups)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Allocate the state of an optimizer that has made no step, for a load to fill."""
    for part in _parts(optimizer):
        if make := _own_state_of(part):
            for group in part.optimizer.param_groups:
                for weight in group["params"]:
                    make(weight, store_param_remainders=False)
        else:
            part.load_state_dict(part.state_dict())


def restore_state(optimizer: MegatronOptimizer, steps: int) -> None:
    """Apply a loaded state; hyperparameters remain those of the configuration.

    Args:
        optimizer: Its `sharded_state` has been filled.
        steps: `count_steps` when it was saved.
    """
    for part in _parts(optimizer):
        if _own_state_of(part):  # the load filled the state itself
            for group in part.optimizer.param_groups:
                group["step"] = steps
            continue
        settings = part.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = steps
        filled = [
            {MAIN_WEIGHT.get(name, name): values for name, values in _state_of(part, weight).items()}
            for weight, _ in _runs(part)
        ]
        # The load may have allocated new tensors: Megatron copies the values to their place.
        kind = {"param_state": dict(enumerate(filled)), "param_state_sharding_type": "fully_sharded_model_space"}
        part.load_state_dict({**settings, **kind})


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that a run of elements of a row-major tensor consists of, in order.

    Args:
        shape: Shape of the tensor.
        start: First element of the run.
        stop: End of the run (exclusive).

    Yields:
        Offsets and sizes of each box.

    Example:
        Elements 4 to 21 of 4 x 6: ((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 3)).
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, inner = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    whole = min(-(-start // row) * row, stop)
    end = max(stop // row * row, whole)
    yield from _in_one_row(shape, row, start, whole)
    if whole < end:
        yield (whole // row, *inner), ((end - whole) // row, *shape[1:])
    yield from _in_one_row(shape, row, end, stop)


def _in_one_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    number = start // row
    for offsets, sizes in boxes(shape[1:], start - number * row, stop - number * row):
        yield (number, *offsets), (1, *sizes)


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Return the optimizers of dense and of expert weights; a stage may have only one of them."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _own_state_of(part: DistributedOptimizer) -> Callable[..., None] | None:
    """Return Transformer Engine's function that allocates a weight's state on the GPU; None for other optimizers.

    Its own load (`FusedAdam.load_state_dict`) would hold all moments twice.
    """
    return getattr(part.optimizer, "initialize_state", None)


def _runs(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Yield this rank's weights and the run (`start`, `end`) of each, in the order of Megatron's reader."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for weight, places in bucket["param_map"].items():
                    yield weight, places["param"]


def _state_of(part: DistributedOptimizer, weight: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    tensors = part._get_main_param_and_optimizer_states(weight)
    return {name: values.detach() for name, values in tensors.items() if name != "step"}


def _pieces(named: ShardedBase, run: Any, values: torch.Tensor, prefix: str) -> Iterator[ShardedTensor]:
    """Yield the boxes of a run of one weight.

    Args:
        named: The weight's sharding; a factory where it consists of several blocks (gate and up).
        run: The elements that this rank holds.
        values: Their state, flat.
        prefix: Prefix of the keys.
    """
    blocks = nested_values(named.build()) if isinstance(named, ShardedTensorFactory) else [named]
    for block in blocks:
        assert block.data.is_contiguous(), f"{block.key} is a block with gaps"
        first = block.data.storage_offset() - named.data.storage_offset()
        start, stop = max(run.start, first), min(run.end, first + block.data.numel())
        at, lead = start - run.start, block.prepend_axis_num
        for offsets, sizes in boxes(block.local_shape, start - first, stop - first):
            shape = (1,) * lead + sizes
            here = (0,) * lead + offsets
            yield ShardedTensor(
                key=f"{prefix}.{block.key}",
                data=values[at : at + math.prod(sizes)].view(shape),
                dtype=values.dtype,
                local_shape=shape,
                global_shape=block.global_shape,
                global_offset=tuple(map(sum, zip(block.global_offset, here, strict=True))),
                axis_fragmentations=None,
                # Each run belongs to exactly one data-parallel rank.
                replica_id=(*block.replica_id[:2], 0),
            )
            at += math.prod(sizes)

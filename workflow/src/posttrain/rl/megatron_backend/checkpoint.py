"""Reads and writes torch_dist checkpoints of the trainer through Megatron's `dist_checkpointing`.

A training checkpoint holds the model's weights, the optimizer's main weights and moments (in a form that any layout can
load, see `optimizer_state`), and the numbers of finished steps and updates. It holds no random state and no data
position, because both are pure functions of the seed and the step.

A save needs no GPU memory, and host memory for one tensor at a time. All its slow work is in one function, which may
run in another thread while nobody changes the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner, load_state_dict
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from posttrain.checkpoint.formats.torch_dist_format import COMMON_NAME, read_common, read_metadata
from posttrain.errors import CheckpointError, reason_of
from posttrain.rl.megatron_backend.glm5.model import LogprobModel
from posttrain.rl.megatron_backend.host_copies import HostCopies
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.optimizer_state import allocate_state, count_steps, restore_state, sharded_state
from posttrain.rl.megatron_backend.sleep import SleepingTrainer


def load_weights(chunks: Sequence[LogprobModel], folder: Path) -> None:
    """Load the model's weights from a torch_dist folder written in any layout and precision.

    Args:
        chunks: This rank's part of the model.
        folder: A converted or a training checkpoint.

    Raises:
        CheckpointError: A weight is missing or has another shape.
    """
    wanted = sharded_weights(chunks)
    loaded = _load({"model": wanted}, folder)["model"]
    _fill(chunks, loaded)


def prepare_save(
    policy: Policy,
    step: int,
    folder: Path,
    group: dist.ProcessGroup | None = None,
    trainer: SleepingTrainer | None = None,
) -> Callable[[], None]:
    """Write everything but weights and optimizer state, and return the function that writes those; both are collective.

    Args:
        policy: Model and optimizer; must not change before the returned function is done.
        step: Number of finished steps.
        folder: An existing empty folder.
        group: Process group of the returned function; must be separate if another thread uses the default group.
        trainer: Colocated trainer that may be offloaded meanwhile: its host copies are written. Its weights are awake.

    Returns:
        The rest of the save. The caller makes the folder visible once it has finished on all ranks.
    """
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    counts = {"step": step, "optimizer_steps": count_steps(policy.optimizer)}
    strategy = InProcessSave(group)
    # torch's save planner checks that ranks together hold each tensor once. Skip Megatron's own check, which gathers a
    # list of all shards over the default group.
    state = _training_state(policy)
    if trainer:
        trainer.copy_weights()
        for piece in (*state["model"].values(), *state["optimizer"]):
            piece.data = trainer.on_host(piece.data)
    dist_checkpointing.save(
        {**state, **counts},
        str(folder),
        sharded_strategy=strategy,
        validate_access_integrity=False,
    )
    return strategy.write


def load_training_state(policy: Policy, folder: Path) -> int:
    """Load a training checkpoint into any layout; collective.

    Args:
        policy: Model and optimizer to fill.
        folder: A committed checkpoint.

    Returns:
        The number of finished steps.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
    """
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    counts = _read_counts(folder)
    # A checkpoint from before the first update has no moments; an optimizer without moments continues the same.
    has_moments = counts["optimizer_steps"] > 0
    if has_moments:
        allocate_state(policy.optimizer)
    # The boxes are views of the optimizer's state, so the load fills it in place.
    state = _load(_training_state(policy), folder)
    _fill(policy.chunks, state["model"])
    if has_moments:
        restore_state(policy.optimizer, counts["optimizer_steps"])
    return counts["step"]


class SafeLoad(TorchDistLoadShardedStrategy):
    """Loads only tensors, at the places given by metadata from `read_metadata`.

    Megatron's own strategy unpickles `.metadata` and every object it lists, which can run arbitrary code.

    Args:
        metadata: Metadata of the folder.
    """

    def __init__(self, metadata: Metadata):
        super().__init__()
        self._metadata = metadata

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Load sharded tensors in place, as Megatron's strategy does."""
        tensors = list(nested_values(sharded_state_dict))
        self._require_tensors(tensor.key for tensor in tensors)
        by_key, names, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        filled = mcore_to_pyt_state_dict(by_key, True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        load_state_dict(filled, _ReaderOf(self._metadata, checkpoint_dir), planner=planner)
        values = {key: _unwrap_pyt_sharded_tensor(value) for key, value in filled.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(values, names, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def _require_tensors(self, keys: Iterable[str]) -> None:
        """Refuse missing keys, and objects, because torch unpickles objects unchecked."""
        rows = self._metadata.state_dict_metadata
        if wrong := sorted({key for key in keys if not isinstance(rows.get(key), TensorStorageMetadata)}):
            raise CheckpointingException(f"{len(wrong)} tensors are missing, or are no tensors there: {wrong[:5]}")


class _ReaderOf(FileSystemReader):
    """Reads chunks by metadata that was read before."""

    def __init__(self, metadata: Metadata, folder: str | Path):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes torch_dist in this process, when `write` is called.

    Megatron's own strategy forks a writer. The trainer has threads (engine requests, metrics), so a fork may hang, and
    a forked writer outlives a killed trainer. Every version of Megatron reads the files: everything but tensors goes
    into `common.pt`.

    Args:
        group: Process group of `write`; None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self._group = group
        # A new thread starts on device 0.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write everything but tensors, and remember this rank's shards."""
        common = sharded_state_dict.pop("common_state")
        if dist.get_rank() == 0:
            torch.save(common.data, Path(checkpoint_dir) / COMMON_NAME)
        sharded_state_dict, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self._state, self._folder = mcore_to_pyt_state_dict(sharded_state_dict, False), checkpoint_dir
        self._on_host = HostCopies()

    def write(self) -> None:
        """Write this rank's shards and, on rank 0, the metadata; collective."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            torch_save(
                self._state,
                storage_writer=_OneTensorAtATime(self._folder, self._on_host),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise _cause_of(error) from error


class _OneTensorAtATime(FileSystemWriter):
    """Writes a rank's file with only one tensor in host memory at a time.

    torch's own writer keeps the last tensor of each name until the file is complete.

    Args:
        folder: Output folder.
        on_host: Copies a tensor to the host.
    """

    def __init__(self, folder: str | Path, on_host: HostCopies):
        super().__init__(folder)
        self._on_host = on_host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a rank's plan to one file, and return each item's location."""
        name = f"{plan.storage_data.prefix}0.distcp"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream, _as_the_system_says():
            results = [
                _write_item(
                    self.transforms, stream, self._resolved(planner, item), item, name, SerializationFormat.TORCH_SAVE
                )
                for item in plan.items
            ]
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _resolved(self, planner: SavePlanner, item: WriteItem) -> Any:
        data = planner.resolve_data(item)
        if not torch.is_tensor(data):
            return data
        tensor = self._on_host(data)
        # torch.save of a view would write its whole underlying storage.
        return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


@contextmanager
def _as_the_system_says() -> Iterator[None]:
    """Raise the OSError that ended a write, which `torch.save` hides behind an error about the file position."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _training_state(policy: Policy) -> dict[str, Any]:
    weights = sharded_weights(policy.chunks)
    return {"model": weights, "optimizer": sharded_state(policy.optimizer, weights)}


def sharded_weights(chunks: Sequence[LogprobModel]) -> ShardedStateDict:
    """Return the sharded weights by "chunk.name"; a checkpoint names them by the layer number in the whole model.

    Transformer Engine's extra states (scales of FP8 training) are left out.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # Save each layer as its own tensors even if all layers are alike, as in converted checkpoints.
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": True}
    return {
        f"{number}.{name}": value
        for number, chunk in enumerate(chunks)
        for name, value in chunk.sharded_state_dict(metadata=dict(metadata)).items()
        if not _is_extra_state(name)
    }


def _is_extra_state(key: str) -> bool:
    """Return whether a key is a module's extra state, not a weight; grouped experts also have `_extra_state3`."""
    return key.rpartition(".")[2].startswith("_extra_state")


def _read_counts(folder: Path) -> dict[str, int]:
    common = read_common(folder)
    counts: dict[str, Any] = {name: common.get(name) for name in ("step", "optimizer_steps")}
    if not all(type(count) is int for count in counts.values()):
        raise CheckpointError(
            "counts-invalid", f"{folder / COMMON_NAME}: expected whole numbers of steps and updates, found {counts}"
        )
    return counts


def _load(state: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Load like `dist_checkpointing.load` without opening `common.pt`, of which `read_common` reads what we need."""
    strategy = SafeLoad(read_metadata(folder))
    wanted, _, factories = load_preprocess(state)
    try:
        return apply_factory_merges(strategy.load(wanted, folder), factories)
    except (CheckpointingException, CheckpointException, KeyError, TypeError, ValueError, RuntimeError) as error:
        cause = _cause_of(error)
        text = f"{folder} does not fit the model: {type(cause).__name__}: {reason_of(cause)}"
        raise CheckpointError(
            "model-does-not-fit", f"{text}\n  remedy: convert the model again, or check model.architecture"
        ) from error


def _cause_of(error: BaseException) -> BaseException:
    """Return the first rank's exception; torch wraps all of them in a class that is not an `Exception`."""
    return error.failures[min(error.failures)][0] if isinstance(error, CheckpointException) else error


def _fill(chunks: Sequence[LogprobModel], loaded: dict[str, Any]) -> None:
    """Copy loaded tensors into the model; only extra states may be missing."""
    missing, unexpected = torch.nn.ModuleList(chunks).load_state_dict(loaded, strict=False)
    missing = [key for key in missing if not _is_extra_state(key)]
    if missing or unexpected:
        raise CheckpointError("weights-do-not-fit", f"weights missing {missing[:5]}, unexpected {unexpected[:5]}")


def barrier() -> None:
    """Wait for all ranks."""
    if torch.cuda.is_available():
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()

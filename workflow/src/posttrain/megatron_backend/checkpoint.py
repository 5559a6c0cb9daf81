"""Reads and writes torch_dist checkpoints of the trainer through Megatron's `dist_checkpointing`.

What a training checkpoint holds: the model's weights, the optimizer's main weights and moments (in a form that any
layout can load, see `optimizer_state`), and the numbers of finished steps and updates. There is no random state and no
data position to save: both are pure functions of the seed and of the step.

A save needs no memory on the GPU, and in host memory one tensor at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from posttrain.errors import CheckpointError
from posttrain.megatron_backend.glm5.model import LogprobModel
from posttrain.megatron_backend.model import Policy
from posttrain.megatron_backend.optimizer_state import allocate_state, count_steps, restore_state, sharded_state


def load_weights(model: LogprobModel, folder: Path) -> None:
    """Fill the model from a torch_dist folder, whatever layout and precision it was written in.

    Args:
        model: This rank's stage.
        folder: A converted or a training checkpoint.

    Raises:
        CheckpointError: When a weight is missing or has another shape.
    """
    wanted = sharded_weights(model)
    loaded = _load({"model": wanted}, folder)["model"]
    _fill(model, loaded)


def save_training_state(policy: Policy, step: int, folder: Path) -> None:
    """Write weights, optimizer and step count; collective. The caller makes the folder visible when all ranks are done.

    Args:
        policy: What is trained.
        step: Number of finished steps.
        folder: An empty folder that exists.
    """
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    counts = {"step": step, "optimizer_steps": count_steps(policy.optimizer)}
    state = {**_training_state(policy), **counts}
    dist_checkpointing.save(state, str(folder), sharded_strategy=InProcessSave("torch_dist", 1))


def load_training_state(policy: Policy, folder: Path) -> int:
    """Restore what `save_training_state` wrote, in any layout; collective.

    Args:
        policy: Model and optimizer to fill.
        folder: A committed checkpoint.

    Returns:
        The number of finished steps.

    Raises:
        CheckpointError: When the checkpoint does not fit the model.
    """
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    allocate_state(policy.optimizer)
    # The pieces of the optimizer's state are views of it: the load fills them where they are.
    state = _load(_training_state(policy), folder)
    _fill(policy.model, state["model"])
    restore_state(policy.optimizer, int(state["optimizer_steps"]))
    return int(state["step"])


class InProcessSave(SaveShardedStrategy):
    """Writes torch_dist in this process.

    Megatron's own strategy forks a writer. A trainer has threads (requests to engines, metrics), and a fork in the
    midst of them may hang; a forked writer also outlives a trainer that is killed. The files are the same.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards and, on rank 0, the metadata; collective."""
        sharded_state_dict, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_save(
            mcore_to_pyt_state_dict(sharded_state_dict, False),
            storage_writer=_OneTensorAtATime(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects go into the same files."""
        return True


class _OneTensorAtATime(FileSystemWriter):
    """Writes a rank's file with a single tensor in host memory.

    torch's own writer keeps the last tensor of each name until its file is complete.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a rank's plan names into one file, and return where each item lies in it."""
        name = f"{plan.storage_data.prefix}0.distcp"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            results = [
                _write_item(
                    self.transforms, stream, _on_host(planner, item), item, name, SerializationFormat.TORCH_SAVE
                )
                for item in plan.items
            ]
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _on_host(planner: SavePlanner, item: WriteItem) -> Any:
    data = planner.resolve_data(item)
    if not torch.is_tensor(data):
        return data
    tensor = data.detach().cpu()
    # torch.save of a view would write the whole buffer behind it.
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _training_state(policy: Policy) -> dict[str, Any]:
    weights = sharded_weights(policy.model)
    return {"model": weights, "optimizer": sharded_state(policy.optimizer, weights)}


def sharded_weights(model: LogprobModel) -> ShardedStateDict:
    """Return the sharded weights; Transformer Engine's `_extra_state` (scales of FP8 training) is not part of them."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=groups)
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def _load(state: ShardedStateDict, folder: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError) as error:
        text = f"{folder} does not fit the model: {type(error).__name__}: {error}"
        raise CheckpointError(f"{text}\n  remedy: convert the model again, or check model.architecture") from error


def _fill(model: LogprobModel, loaded: dict[str, Any]) -> None:
    """Copy loaded tensors into the model; nothing else than `_extra_state` may be missing."""
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    missing = [key for key in missing if not key.endswith("_extra_state")]
    if missing or unexpected:
        raise CheckpointError(f"weights missing {missing[:5]}, unexpected {unexpected[:5]}")


def barrier() -> None:
    """Wait for all ranks."""
    if torch.cuda.is_available():
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()

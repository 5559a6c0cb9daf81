"""Reads and writes torch_dist checkpoints of the trainer through Megatron's `dist_checkpointing`.

What a training checkpoint holds: the model's weights, the optimizer's main weights and moments (in a form that any
layout can load), and the number of finished steps. There is no random state and no data position to save: both are pure
functions of the seed and of the step.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException

from posttrain.errors import CheckpointError
from posttrain.megatron_backend.glm5.model import LogprobModel
from posttrain.megatron_backend.model import Policy

WRITER_THREADS = 1


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
    state = _training_state(policy, loading=False)
    state["step"] = step
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
    state = _load(_training_state(policy, loading=True), folder)
    _fill(policy.model, state["model"])
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    policy.optimizer.load_state_dict(state["optimizer"])
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
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=WRITER_THREADS, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects go into the same files."""
        return True


def _training_state(policy: Policy, loading: bool) -> dict[str, Any]:
    weights = sharded_weights(policy.model)
    assert policy.optimizer is not None, "a policy without optimizer has no training state"
    optimizer = policy.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_metadata())
    return {"model": weights, "optimizer": optimizer}


def sharded_weights(model: LogprobModel) -> ShardedStateDict:
    """Return the sharded weights; Transformer Engine's `_extra_state` (scales of FP8 training) is not part of them."""
    state = model.sharded_state_dict(metadata=_metadata())
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


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

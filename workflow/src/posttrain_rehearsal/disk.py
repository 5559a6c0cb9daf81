"""Checkpoints of a rehearsal: the trainer's own code plans, reads and writes them, and their tensors have no bytes.

Files, names, manifests and the commit are real. Not so what ranks agree on: with few of them there, nobody knows
whether all together hold each tensor once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from posttrain.checkpoint.formats.torch_dist import planned_metadata
from posttrain.checkpoint.formats.torch_dist_format import METADATA_NAME, FormatUnpickler
from posttrain.config.schema import Architecture
from posttrain.rl.megatron_backend import checkpoint
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.sleep import SleepingTrainer
from posttrain.rl.training import checkpoint_writer
from posttrain.rl.training.checkpoint_writer import CheckpointWriter
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.rl.training.saved_state import CheckpointToLoad, SavedState


def converted(arch: Architecture, folder: Path) -> None:
    """Write what a conversion says of a model that it has written: which tensors there are."""
    folder.mkdir()
    (folder / METADATA_NAME).write_bytes(pickle.dumps(planned_metadata(arch), protocol=4))


def provide(fake: FakeTensorMode) -> None:
    """Let this rank read and write checkpoints without bytes.

    Args:
        fake: Makes tensors that have none.
    """
    checkpoint.torch_save = _save  # type: ignore[assignment]
    checkpoint.load_state_dict = partial(checkpoint.load_state_dict, no_dist=True)
    checkpoint._write_item = _noted  # type: ignore[assignment]

    class Reader(checkpoint._ReaderOf):
        """Gives tensors of the types that metadata say."""

        def read_data(self, plan: Any, planner: Any) -> TorchFuture[None]:
            for item in plan.items:
                row = self._metadata.state_dict_metadata[item.storage_index.fqn]
                assert isinstance(row, TensorStorageMetadata)
                with fake:
                    values = torch.empty(item.lengths, dtype=row.properties.dtype)
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
            done: TorchFuture[None] = TorchFuture()
            done.set_result(None)
            return done

    checkpoint._ReaderOf = Reader  # type: ignore[misc]
    # Of one rank's plan it would say that others are missing.
    default_planner._validate_global_plan = lambda *_: []
    checkpoint_writer.in_thread = _at_once


def saved_state(
    policy: Policy, torch_dist: Path, folder: Path, finished: int, trainer: SleepingTrainer | None = None
) -> SavedState:
    """Return what begins with weights, or with the checkpoint after some steps, and saves.

    Args:
        policy: Model and optimizer.
        torch_dist: From `converted`.
        folder: Gets the checkpoints of all ranks.
        finished: 0 for weights.
        trainer: See `CheckpointWriter`.
    """
    checkpoints = CheckpointFolder(folder, keep=1)
    writer = CheckpointWriter(policy, checkpoints, needed_bytes=0, forget_before=lambda finished: None, trainer=trainer)
    return SavedState(policy, torch_dist, CheckpointToLoad(checkpoints, finished), checkpoints, writer)


def _save(state: Any, storage_writer: Any, planner: Any, process_group: Any) -> None:
    """Do as `torch.distributed.checkpoint.save` without asking others, and join what each rank says it wrote."""
    torch.distributed.checkpoint.save(
        state,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        use_collectives=False,
    )
    if dist.get_rank() == 0:
        folder = Path(storage_writer.path)
        (folder / METADATA_NAME).write_bytes(pickle.dumps(_joined(folder), protocol=4))
    dist.barrier(process_group)


def _joined(folder: Path) -> Metadata:
    whole = Metadata(state_dict_metadata={}, storage_data={})
    for path in sorted(folder.glob(f"*{METADATA_NAME}")):
        with open(path, "rb") as file:
            part = FormatUnpickler(file).load()
        for key, row in part.state_dict_metadata.items():
            known = whole.state_dict_metadata.setdefault(key, row)
            if known is not row and isinstance(known, TensorStorageMetadata):
                known.chunks += row.chunks
        whole.storage_data |= part.storage_data
    return whole


def _noted(transforms: Any, stream: Any, data: torch.Tensor, item: Any, name: str, serialization: Any) -> WriteResult:
    if data.device.type != "cpu":
        raise AssertionError("Tensor must be on CPU device")  # in torch's words
    return WriteResult(item.index, data.nbytes, _StorageInfo(name, 0, data.nbytes))


def _at_once(work: Callable[[], None]) -> Future[None]:
    """Do what another thread would, for which nothing here is simulated."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done

"""Checkpoints of a rehearsal: the trainer's own code plans, reads and writes tensors without bytes.

Files, names, manifests and the commit are real. Global validation is not: most ranks are absent, so the rehearsal
cannot check that all ranks together save each tensor once.
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
    """Write the metadata of a converted checkpoint: the list of its tensors."""
    folder.mkdir()
    (folder / METADATA_NAME).write_bytes(pickle.dumps(planned_metadata(arch), protocol=4))


def provide(fake: FakeTensorMode) -> None:
    """Make this rank read and write checkpoints without bytes.

    Args:
        fake: Creates tensors without memory.
    """
    checkpoint.torch_save = _save  # type: ignore[assignment]
    checkpoint.load_state_dict = partial(checkpoint.load_state_dict, no_dist=True)
    checkpoint._write_item = _noted  # type: ignore[assignment]

    class Reader(checkpoint._ReaderOf):
        """Returns tensors of the metadata's types."""

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
    # It would report the tensors of absent ranks as missing.
    default_planner._validate_global_plan = lambda *_: []
    checkpoint_writer.in_thread = _at_once


def saved_state(
    policy: Policy, torch_dist: Path, folder: Path, finished: int, trainer: SleepingTrainer | None = None
) -> SavedState:
    """Return a state that resumes from initial weights or a checkpoint, and saves.

    Args:
        policy: Model and optimizer.
        torch_dist: From `converted`.
        folder: Gets the checkpoints of all ranks.
        finished: Number of finished steps of the checkpoint; 0: initial weights.
        trainer: See `CheckpointWriter`.
    """
    checkpoints = CheckpointFolder(folder, keep=1)
    writer = CheckpointWriter(policy, checkpoints, needed_bytes=0, forget_before=lambda finished: None, trainer=trainer)
    return SavedState(policy, torch_dist, CheckpointToLoad(checkpoints, finished), checkpoints, writer)


def _save(state: Any, storage_writer: Any, planner: Any, process_group: Any) -> None:
    """Call `torch.distributed.checkpoint.save` without collectives, and merge the metadata of all ranks."""
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
        raise AssertionError("Tensor must be on CPU device")  # torch's message
    return WriteResult(item.index, data.nbytes, _StorageInfo(name, 0, data.nbytes))


def _at_once(work: Callable[[], None]) -> Future[None]:
    """Run the work of another thread at once: threads are not simulated."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done

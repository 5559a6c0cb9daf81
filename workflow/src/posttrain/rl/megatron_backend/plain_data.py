"""Exchanges objects between ranks as JSON, because unpickling could run a peer's code."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# All ranks, over gloo; None if torch's default group is gloo.
_of_all: dist.ProcessGroup | None = None


def open_control_group(timeout: timedelta) -> None:
    """Exchange objects between all ranks over gloo from now on; collective.

    A rank that waits for a rollout in an NCCL collective would keep its GPU busy, which engines need for decoding.
    """
    global _of_all
    _of_all = dist.new_group(backend="gloo", timeout=timeout)


def forget_control_group() -> None:
    """Exchange objects over torch's default group again, after the gloo group was destroyed."""
    global _of_all
    _of_all = None


def gather_tensors(mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Gather the tensors of all ranks, in rank order; collective.

    Args:
        mine: [n] on the CPU; n may differ between ranks, the dtype may not.
        group: Process group; None for all ranks.
    """
    group = group or _of_all
    device, count = _device(group), dist.get_world_size(group)
    if count == 1:
        return [mine]
    length = torch.tensor([len(mine)], device=device)
    lengths = [torch.empty_like(length) for _ in range(count)]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(other) for other in lengths)
    padded = torch.zeros(longest, dtype=mine.dtype, device=device)
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(gathered, padded, group=group)
    return [rows[: int(length)].cpu() for rows, length in zip(gathered, lengths, strict=True)]


def gather_plain(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather each rank's object, in rank order; collective.

    Args:
        mine: JSON types and dataclasses of them, received as lists and dictionaries. Floats keep their bits.
        group: Process group; None for all ranks.
    """
    return [_decoded(content) for content in gather_tensors(_encoded(mine), group)]


def share_plain(content: Any) -> Any:
    """Broadcast rank 0's object to every rank; collective. The argument of other ranks is ignored.

    Args:
        content: Same types as in `gather_plain`.
    """
    device, is_first = _device(_of_all), dist.get_rank() == 0
    message = _encoded(content if is_first else None).to(device)
    if dist.get_world_size(_of_all) == 1:
        return _decoded(message.cpu())
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, src=0, group=_of_all)
    message = message if is_first else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, src=0, group=_of_all)
    return _decoded(message.cpu())


def _encoded(content: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content, default=vars).encode()), dtype=torch.uint8)


def _decoded(content: torch.Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for tensors of the group's backend."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

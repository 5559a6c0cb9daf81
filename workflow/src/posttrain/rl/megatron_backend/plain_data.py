"""Objects between ranks as JSON: unpickling would run what others have written."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# All ranks, over gloo; None where that is torch's own group of all.
_of_all: dist.ProcessGroup | None = None


def open_control_group(timeout: timedelta) -> None:
    """Send objects between all ranks over gloo from now on; collective.

    A rank that waits for a rollout in a collective of NCCL keeps its GPU busy, on which engines decode.
    """
    global _of_all
    _of_all = dist.new_group(backend="gloo", timeout=timeout)


def forget_control_group() -> None:
    """Send objects over torch's default group again, after the gloo group was left."""
    global _of_all
    _of_all = None


def gather_tensors(mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the order of ranks; collective.

    Args:
        mine: [n] on the CPU; n may differ from rank to rank, the type may not.
        group: The ranks; None for all.
    """
    group = group or _of_all
    device, count = _device(group), dist.get_world_size(group)
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
    """Return what each rank has given, in the order of ranks; collective.

    Args:
        mine: JSON types and dataclasses of them; the others see lists and dictionaries. Floats keep their bits.
        group: The ranks; None for all.
    """
    return [_decoded(content) for content in gather_tensors(_encoded(mine), group)]


def share_plain(content: Any) -> Any:
    """Return what rank 0 has given, on every rank; collective. Others may give anything.

    Args:
        content: As `gather_plain` has it.
    """
    device, is_first = _device(_of_all), dist.get_rank() == 0
    message = _encoded(content if is_first else None).to(device)
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
    """Return where tensors lie that go through the group."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

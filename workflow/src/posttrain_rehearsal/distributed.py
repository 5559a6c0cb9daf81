"""Process groups of which only some ranks exist: records every call, and delivers messages that have values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from posttrain_rehearsal.device import SimulatedDevice, tensors_of
from posttrain_rehearsal.messages import Messages, from_bytes, to_bytes
from posttrain_rehearsal.recorder import Recorder, place

# The group is their second argument; it is the third of all other operations.
OF_ONE = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "recv_", "recv_any_source_", "barrier"}
# Device of NCCL's tensors.
DEVICE = "cuda"
# Limit of small floating-point tensors, in bytes.
SMALL = 4096
_OPERATIONS = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
}


class Groups:
    """Executes c10d operations.

    Integer tensors have values, which are delivered: lengths, counts, shapes, objects as bytes. Of floating-point
    tensors, only small ones in broadcasts and all-reduces are: statistics.

    Args:
        recorder: Gets every call.
        messages: Messages between the rehearsed ranks.
    """

    device: SimulatedDevice

    def __init__(self, recorder: Recorder, messages: Messages):
        self._recorder, self._messages = recorder, messages
        # Names of groups for host tensors.
        self.of_host: set[str] = set()

    def __call__(self, func: Any, args: Sequence[Any]) -> Any:
        """Record a call, deliver values, and return the operation's result.

        Raises:
            RuntimeError: NCCL rejects such tensors.
        """
        name = func._schema.name.partition("::")[2]
        group = ProcessGroup.unbox(args[1] if name in OF_ONE else args[2])
        tensors = list(tensors_of(args[:1] if name in OF_ONE else args[:2]))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        peer = args[2] if name in ("send", "recv_") else None
        ranks = dist.get_process_group_ranks(group)
        of_host = group.group_name in self.of_host
        self._recorder.collective(name, group, tensors, size, None if peer is None else ranks[peer], of_host)
        if name != "barrier" and not of_host:
            require_nccl_takes(tensors)
        is_small = name in ("broadcast_", "allreduce_") and size <= SMALL
        if name == "barrier" or (tensors and (not tensors[0].is_floating_point() or is_small)):
            self._deliver(name, group.group_name, ranks, args)
        work = FakeWork().boxed()
        returns = func._schema.returns
        if len(returns) == 1:
            return work
        return (*([args[0]] if len(returns) == 2 else args[: len(returns) - 1]), work)

    def _deliver(self, name: str, group: str, ranks: Sequence[int], args: Sequence[Any]) -> None:
        """Deliver values."""
        where = place()
        if name == "barrier":
            self._messages.all_said(group, ranks, name, where, b"")
        elif name == "send":
            self._messages.send(ranks[args[2]], name, where, self._bytes(args[0][0]))
        elif name == "recv_":
            self._set(args[0][0], self._messages.receive(ranks[args[2]], where))
        elif name in ("allgather_", "_allgather_base_"):
            mine = args[1][0] if name == "allgather_" else args[1]
            said = self._messages.all_said(group, ranks, name, where, self._bytes(mine))
            outputs = args[0][0] if name == "allgather_" else args[0].view(len(ranks), -1).unbind(0)
            for output, content in zip(outputs, said, strict=True):
                self._set(output, content)
        elif name == "broadcast_":
            # Rollouts are broadcast, so only the source's bytes are sent.
            mine = self._bytes(args[0][0]) if ranks[args[2]] == dist.get_rank() else b""
            said = self._messages.all_said(group, ranks, name, where, mine)
            self._set(args[0][0], said[args[2]])
        elif name == "allreduce_":
            said = self._messages.all_said(group, ranks, name, where, self._bytes(args[0][0]))
            values = [value for content in said if (value := from_bytes(content, args[0][0])) is not None]
            if len(values) == len(said) and (combine := _OPERATIONS.get(args[2].op())):
                combined = combine(torch.stack(values)).to(args[0][0].dtype)
                self._put(args[0][0], combined)
                self._recorder.sums.append((where, combined.reshape(-1).tolist()))

    def _bytes(self, tensor: torch.Tensor) -> bytes:
        return to_bytes(self._values(tensor))

    def _values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.device.mirror(tensor) if tensor.device.type == "cuda" else tensor

    def _set(self, tensor: torch.Tensor, content: bytes) -> None:
        values = from_bytes(content, tensor)
        if values is not None:
            self._put(tensor, values)

    def _put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if tensor.device.type == "cuda":
            self.device.set_values(tensor, values)
        else:
            tensor.copy_(values)


def require_nccl_takes(tensors: Sequence[torch.Tensor]) -> None:
    """Raise torch's errors for tensors that NCCL rejects (`ProcessGroupNCCL.cpp`, `check_gpu_single_tensor`).

    For non-contiguous tensors in point-to-point calls torch itself only warns, and sends the gaps as well.
    """
    for tensor in tensors:
        if tensor.device.type != DEVICE:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if not tensor.is_contiguous():
            raise ValueError(f"Tensors must be contiguous: {tuple(tensor.shape)} has strides {tensor.stride()}")


def join(rank: int, world_size: int, gpus_per_node: int, created: list[list[int]], of_host: set[str]) -> None:
    """Make this process one rank of a world whose other ranks do not exist.

    Args:
        rank: This rank.
        world_size: Number of all ranks.
        gpus_per_node: Determines the rank's device.
        created: Gets the ranks of each new group, in order.
        of_host: Gets the names of groups for host tensors.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % gpus_per_node)}
    new_group = dist.new_group

    def make(ranks: Any = None, *args: Any, backend: Any = None, **more: Any) -> Any:
        created.append(list(range(world_size)) if ranks is None else list(ranks))
        made = new_group(ranks, *args, **more)
        if backend == "gloo" and isinstance(made, ProcessGroup):
            of_host.add(made.group_name)
        return made

    def is_of_host(group: Any) -> bool:
        return isinstance(group, ProcessGroup) and group.group_name in of_host

    batch = dist.batch_isend_irecv
    # A batch starts all calls at once. Send first here, or ranks of a ring that receive first would deadlock.
    dist.batch_isend_irecv = lambda p2p_op_list: batch(sorted(p2p_op_list, key=lambda call: call.op is not dist.isend))
    dist.new_group = make
    dist.get_backend = lambda group=None: dist.Backend(  # type: ignore[misc]
        "gloo" if is_of_host(group) else "nccl"
    )
    dist.distributed_c10d._get_object_coll_device = lambda group=None: "cpu" if is_of_host(group) else "cuda"

    from posttrain.rl.megatron_backend import initialize

    initialize.join_ranks = lambda backend, timeout: dist.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )

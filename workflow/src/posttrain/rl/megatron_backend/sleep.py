"""Offloads a rank's weights and optimizer state to host memory while engines use the GPU.

Weights are views of Megatron's buffers, and their hooks do not survive a change of device. So their storages are
resized to zero and refilled later, which keeps every view valid. Only the optimizer uses its tensors, so these become
host tensors, from which checkpoints are written directly. Gradients are dropped: every update begins with zeros.

The host memory is kept and pinned, which makes copies five times as fast; the plan counts it as `sleeping_weights` and
`sleeping_optimizer`. With Megatron's own offload (`_ParamAndGradBuffer.offload_to_cpu`), torch's allocator rounds it up
to a power of two, and an optimizer that belongs on the host moves to the GPU on reload.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from posttrain.plan.sizing.phases import OPTIMIZER, TRAINER
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.optimizer_state import state_tensors

log = logging.getLogger(__name__)
# Bytes; a multiple of every dtype's size, so that elements are aligned.
ALIGNMENT = 256


class SleepingTrainer:
    """Offloads and reloads the parts of a rank's trainer (`plan.sizing.phases`).

    Args:
        policy: On the GPU at first.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._weights, self._state = _HostMemory(), _HostMemory()
        self._whole: list[torch.Tensor] = []
        # Emptied storage -> its content on the host; optimizer tensor -> its device.
        self._places: dict[int, torch.Tensor] = {}
        self._moved: list[tuple[torch.Tensor, torch.device]] = []

    @torch.no_grad()
    def sleep(self, parts: Iterable[str]) -> None:
        """Offload parts that are awake; their GPU memory is free for others when this returns."""
        parts = {*parts} & {TRAINER, OPTIMIZER}
        if OPTIMIZER in parts:
            self._put_optimizer_to_sleep()
        if TRAINER in parts:
            self.copy_weights()
            for weights in self._whole:
                weights.untyped_storage().resize_(0)
        if parts and torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self, parts: Iterable[str]) -> None:
        """Reload sleeping parts, bit for bit."""
        parts = {*parts}
        if TRAINER in parts:
            for weights in self._whole:
                storage = weights.untyped_storage()
                content = self._places[storage._cdata]
                storage.resize_(content.numel())
                weights.copy_(content, non_blocking=True)
            self._places = {}
        if OPTIMIZER in parts:
            for tensor, device in self._moved:
                tensor.data = tensor.data.to(device, non_blocking=True, copy=True)
            self._moved = []
            for buffer in self._policy.buffers:
                buffer.reload_from_cpu(move_params=False)
        _synchronize()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Update the host copy if the weights are awake."""
        if self._places:
            return
        self._whole = [*self._whole_weights().values()]
        places = self._weights.places([len(weights) for weights in self._whole])
        for weights, place in zip(self._whole, places, strict=True):
            place.copy_(weights, non_blocking=True)
            self._places[weights.untyped_storage()._cdata] = place
        _synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host copy of (part of) a weight, as of `copy_weights`; other tensors unchanged."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        values = place.view(tensor.dtype)
        return values.as_strided(tensor.size(), tensor.stride(), values.storage_offset() + tensor.storage_offset())

    def _whole_weights(self) -> dict[int, torch.Tensor]:
        """Return the storages of all weights, including untrained ones, each as a byte tensor."""
        buffers = {buffer.param_data.untyped_storage()._cdata: buffer.param_data for buffer in self._policy.buffers}
        others = {p.untyped_storage()._cdata: p.detach() for p in self._policy.parameters()}
        whole = others | buffers
        assert all(weights.nbytes == weights.untyped_storage().nbytes() for weights in whole.values()), "a part of one"
        return {key: weights.view(-1).view(torch.uint8) for key, weights in whole.items()}

    def _put_optimizer_to_sleep(self) -> None:
        assert self._policy.optimizer is not None, "a policy that is trained has one"
        weights, device = self._whole_weights(), self._policy.device.type
        # A precision without FP32 main weights lets the optimizer hold the weights themselves.
        own = {
            id(tensor): tensor
            for tensor in state_tensors(self._policy.optimizer)
            if tensor.device.type == device and tensor.untyped_storage()._cdata not in weights
        }
        places = self._state.places([tensor.nbytes for tensor in own.values()])
        for tensor, place in zip(own.values(), places, strict=True):
            self._moved.append((tensor, tensor.device))
            host = place.view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor, non_blocking=True)
            tensor.data = host  # safe: the storage is freed in stream order, after the copy
        _synchronize()
        for buffer in self._policy.buffers:
            buffer.offload_to_cpu(move_params=False)


class _HostMemory:
    """One block of host memory, pinned on GPU machines, as large as the largest request so far."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def places(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        """Yield byte tensors of these sizes, at the same addresses each time."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        if starts[-1] > len(self._block):
            self._unpin()
            del self._block  # free the old block first: both may exceed the node's memory
            self._block = self._made(starts[-1])
            self._pin()
        yield from (self._block[start : start + size] for start, size in zip(starts, sizes, strict=False))

    def _made(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _pin(self) -> None:
        if torch.cuda.is_available():
            error = int(torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), len(self._block), 0))
            if error:
                log.warning("%d bytes cannot be pinned (CUDA error %d): sleeping takes longer", len(self._block), error)

    def _unpin(self) -> None:
        if torch.cuda.is_available() and len(self._block):
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""A trainer that sleeps and wakes on a simulated device, without colocated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from posttrain.rl.megatron_backend import sleep
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.sleep import SleepingTrainer
from posttrain_rehearsal.device import SimulatedDevice
from posttrain_rehearsal.recorder import Recorder


def provide(device: SimulatedDevice, recorder: Recorder) -> None:
    """Report resized storages to a recorder; host copies of sleeping tensors have no memory."""
    original = torch.UntypedStorage.resize_

    def made(_: Any, size: int) -> torch.Tensor:
        return device.on_host_without_bytes(size)

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        recorder.resized(self._cdata, size)
        return original(self, size)

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
    sleep._HostMemory._made = made  # type: ignore[assignment,method-assign]
    sleep._HostMemory._pin = sleep._HostMemory._unpin = lambda self: None  # type: ignore[method-assign]


class SimulatedSleep(SleepingTrainer):
    """Updates its tensors' devices: a tensor without values does not notice that its data moved to the host.

    Args:
        policy: An awake policy.
        has_woken: Called when tensors have new storages on the device.
    """

    def __init__(self, policy: Policy, has_woken: Callable[[], None]):
        super().__init__(policy)
        self._has_woken = has_woken

    def sleep(self, parts: Iterable[str]) -> None:
        """Offload parts to the host."""
        super().sleep(parts)
        for tensor, _ in self._moved:
            tensor.fake_device = torch.device("cpu")  # type: ignore[attr-defined]

    def wake(self, parts: Iterable[str]) -> None:
        """Load parts back to the device."""
        asleep = [*self._moved]
        super().wake(parts)
        for tensor, device in asleep:
            tensor.fake_device = torch.device("cpu") if self._moved else device  # type: ignore[attr-defined]
        self._has_woken()


class NoEngines:
    """No engines."""

    def sleep(self, parts: Iterable[str]) -> None:
        """Do nothing."""

    def wake(self, parts: Iterable[str]) -> None:
        """Do nothing."""

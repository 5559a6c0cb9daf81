"""Records a rank phase by phase: live memory, operations, waits for the device, collectives."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Their tensors are [B, S, N, D], but torch's formulas expect [B, N, S, D].
PLACES_FIRST = {
    aten._efficient_attention_forward,
    aten._efficient_attention_backward,
    aten._flash_attention_forward,
    aten._flash_attention_backward,
}
# torch's allocator rounds sizes up to this many bytes.
BLOCK = 512


@dataclass
class Phase:
    """Counts of one phase of a step.

    Args:
        name: Name of the phase.
        peak: Peak of live device memory, in bytes.
        holders: Bytes at the peak by (kind, place in the code).
        host_peak: Peak of large host tensors, in bytes.
        flops: Floating-point operations of matrix products and attention.
        moved: Bytes read and written by operations.
        kernels: Number of operations that start a kernel.
        waits: Place in the code -> number of waits of the host for the device.
    """

    name: str
    step: int = 0
    peak: int = 0
    holders: dict[tuple[str, str], int] = field(default_factory=dict)
    host_peak: int = 0
    flops: int = 0
    moved: int = 0
    kernels: int = 0
    waits: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Records the operations of a `SimulatedDevice`."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._phase = Phase("start")
        self._live: dict[int, tuple[int, str, str]] = {}
        self._host: dict[int, int] = {}
        self._bytes = self._host_bytes = self._snapped = 0
        # Storages of a fused kernel's own operations, which count only if they outlive the kernel.
        self._inside: dict[int, tuple[int, str, str]] | None = None
        self.step = 0
        self.created: list[list[int]] = []
        self.collectives: list[dict[str, Any]] = []
        # Small tensors that ranks added up: the place in the code, and the result.
        self.sums: list[tuple[str, list[float]]] = []
        # Name, count over the ranks, expected count, place of the sum (`values`).
        self.counted: list[tuple[str, int, int, str]] = []
        # Parts of weights, the ranks over which their gradients are reduced, and the place of their buffer.
        self.reductions: list[dict[str, Any]] = []
        # Places of the buffers whose gradients grew after their reduction had begun.
        self.late: list[str] = []
        self.values: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None
        # Called at the start of each phase.
        self.announce: Callable[[Phase], None] = lambda phase: None

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Record the block as a phase."""
        before, self._phase = self._phase, Phase(name, self.step, peak=self._bytes, host_peak=self._host_bytes)
        self._phase.holders, self._snapped = self._held(), self._bytes
        self.phases.append(self._phase)
        self.announce(self._phase)
        try:
            yield self._phase
        finally:
            if self._bytes == self._phase.peak > self._snapped:
                self._phase.holders = self._held()
            self._phase = before

    @property
    def phase_name(self) -> str:
        """Name of the current phase."""
        return self._phase.name

    @property
    def peak(self) -> int:
        """Peak of live bytes in the current phase."""
        return self._phase.peak

    @contextmanager
    def counts(self) -> Iterator[Phase]:
        """Record the block in the current phase and separately; memory is counted above what is already live."""
        outer, base, held, snapped = self._phase, self._bytes, self._held(), self._snapped
        inner = self._phase = Phase(outer.name, self.step, peak=base, host_peak=self._host_bytes)
        self._snapped = base
        try:
            yield inner
        finally:
            if self._bytes == inner.peak > self._snapped:
                inner.holders = self._held()
            self._phase, self._snapped = outer, snapped
            inner.peak -= base
            inner.holders = {key: size - held.get(key, 0) for key, size in inner.holders.items()}
            self._add_counts(inner, base, held)

    def repeat(self, counts: Phase) -> None:
        """Count the events of a `counts` block once more."""
        self._add_counts(counts, self._bytes, None)

    def _add_counts(self, counts: Phase, base: int, held: dict[tuple[str, str], int] | None) -> None:
        phase = self._phase
        phase.flops += counts.flops
        phase.moved += counts.moved
        phase.kernels += counts.kernels
        for where, times in counts.waits.items():
            phase.waits[where] = phase.waits.get(where, 0) + times
        phase.host_peak = max(phase.host_peak, counts.host_peak)
        if base + counts.peak > phase.peak:
            phase.peak, held = base + counts.peak, self._held() if held is None else held
            phase.holders = {key: held.get(key, 0) + counts.holders.get(key, 0) for key in {**held, **counts.holders}}
            self._snapped = phase.peak

    def label(self, key: int, kind: str) -> None:
        """Set the kind of a storage."""
        if key in self._live:
            size, _, place = self._live[key]
            self._live[key] = size, kind, place

    def place_of(self, key: int) -> str:
        """Return the place in the code that created a storage."""
        return self._live[key][2]

    def allocated(self, key: int, size: int, device: str) -> None:
        """Record a new storage."""
        if device != "cuda":
            self._host[key] = size
            self._host_bytes += size
            self._phase.host_peak = max(self._phase.host_peak, self._host_bytes)
            return
        made = -(-size // BLOCK) * BLOCK, "activations", place()
        if self._inside is not None:
            self._inside[key] = made
        else:
            self._add(key, made)

    def begin_anew(self) -> None:
        """Start with empty memory, as in a new process."""
        self._live.clear()
        self._host.clear()
        self._bytes = self._host_bytes = self._snapped = 0

    def _add(self, key: int, made: tuple[int, str, str]) -> None:
        self._live[key] = made
        self._bytes += made[0]
        self._phase.peak = max(self._phase.peak, self._bytes)

    @contextmanager
    def fused(self, read: int) -> Iterator[None]:
        """Count the block's operations as one kernel; of its memory only what is live at the end counts.

        Args:
            read: Bytes of the kernel's inputs.
        """
        if self._inside is not None:
            yield
            return
        self._inside, kernels, moved = {}, self._phase.kernels, self._phase.moved
        try:
            yield
        finally:
            left, self._inside = self._inside, None
            self._phase.kernels, self._phase.moved = kernels + 1, moved + read + sum(made[0] for made in left.values())
            for key, made in left.items():
                self._add(key, made)

    def freed(self, key: int) -> None:
        """Record a freed storage."""
        if self._inside and self._inside.pop(key, None):
            return
        if key in self._host:
            self._host_bytes -= self._host.pop(key)
        elif key in self._live:
            if self._bytes == self._phase.peak and self._bytes > self._snapped * 1.001:
                self._phase.holders, self._snapped = self._held(), self._bytes
            self._bytes -= self._live.pop(key)[0]

    def resized(self, key: int, size: int) -> None:
        """Record a new size of a device storage; kind and place are kept."""
        if key in self._live:
            made = self._live[key]
            self.freed(key)
            self._add(key, (-(-size // BLOCK) * BLOCK, *made[1:]))

    def _held(self) -> dict[tuple[str, str], int]:
        held: dict[tuple[str, str], int] = defaultdict(int)
        for size, kind, where in self._live.values():
            held[kind, where] += size
        return dict(held)

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operation of the device."""
        if func.is_view:
            return
        self._phase.kernels += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula:
            given = map(_heads_first, args) if func._overloadpacket in PLACES_FIRST else args
            self._phase.flops += formula(*given, **kwargs, out_val=out)
        for value in (*args, out):
            if isinstance(value, torch.Tensor):
                self._phase.moved += value.numel() * value.element_size()

    def kernel(self, flops: int, moved: int) -> None:
        """Record a kernel outside of torch."""
        self._phase.kernels += 1
        self._phase.flops += flops
        self._phase.moved += moved

    def collective(
        self, name: str, group: Any, tensors: list[Any], size: int, peer: int | None = None, of_host: bool = False
    ) -> None:
        """Record a collective; `of_host`: with gloo, where no device waits."""
        self.collectives.append(
            {
                "name": name,
                "group": group.group_name,
                "ranks": torch.distributed.get_process_group_ranks(group),
                "shapes": [list(tensor.shape) for tensor in tensors],
                "dtype": str(tensors[0].dtype) if tensors else "",
                "bytes": size,
                "peer": peer,
                "of_host": of_host,
                "phase": f"{self.step} {self.phase_name}",
                "place": place(),
            }
        )

    def wait(self, func: Any) -> None:
        """Record that the host waits for the device."""
        key = f"{place()} ({func})"
        self._phase.waits[key] = self._phase.waits.get(key, 0) + 1


def _heads_first(value: Any) -> Any:
    return value.transpose(1, 2) if isinstance(value, torch.Tensor) and value.dim() == 4 else value


def place() -> str:
    """Return the innermost line of our code and, below it, of Megatron or Transformer Engine."""
    frame: FrameType | None = sys._getframe(2)
    theirs = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/posttrain/" in name:
            ours = f"{name.rpartition('/posttrain/')[2]}:{frame.f_lineno}"
            return f"{ours} {theirs}".strip()
        if not theirs and ("/megatron/core/" in name or "/transformer_engine/" in name):
            root = "megatron/core/" if "/megatron/core/" in name else "transformer_engine/"
            theirs = f"{root}{name.rpartition(root)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return theirs or "autograd"

"""Copies of a GPU's tensors for a thread that writes them to disk while the main thread goes on.

On the stream that all threads share by default, a copy would wait for what the main thread has begun there: for a
rollout's end, where ranks wait for it on their GPUs.
"""

from __future__ import annotations

import torch

# Larger tensors are copied through the driver's own buffers: torch keeps pinned memory for good, by powers of two.
MOST_PINNED_BYTES = 1 << 28


class HostCopies:
    """Copies tensors to the host as they were, or will be, when this is made: after the present stream's work so far.

    Made by the thread that has changed the tensors; nobody changes them until the last copy is made.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host with these values; a tensor that is there already is returned itself."""
        if self._stream is None or tensor.device.type != "cuda":
            return tensor.detach().cpu()
        with torch.cuda.stream(self._stream):
            if tensor.nbytes > MOST_PINNED_BYTES:
                return tensor.detach().cpu()
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor.detach(), non_blocking=True)
            self._stream.synchronize()
        return copy

"""Copies of a GPU's tensors for a thread that writes them to disk while the main thread goes on.

On the default stream, which all threads share, a copy would wait for the main thread's queued work: for the end of the
rollout, which ranks await on their GPUs.
"""

from __future__ import annotations

import torch

# Copy larger tensors through the driver's buffers: torch never frees pinned memory and rounds it to powers of two.
MOST_PINNED_BYTES = 1 << 28


class HostCopies:
    """Copies tensors to the host with the values they have after the current stream's work queued so far.

    Create it in the thread that changed the tensors; do not change them before the last copy.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor on the host, or the tensor itself if it is already there."""
        if self._stream is None or tensor.device.type != "cuda":
            return tensor.detach().cpu()
        with torch.cuda.stream(self._stream):
            if tensor.nbytes > MOST_PINNED_BYTES:
                return tensor.detach().cpu()
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor.detach(), non_blocking=True)
            self._stream.synchronize()
        return copy

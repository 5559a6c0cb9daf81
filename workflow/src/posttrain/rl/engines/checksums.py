"""Checksums of served weights; equal checksums mean that an engine holds exactly the expected bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes in row-major order."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """Return one SHA-256 over all names and their checksums, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]}\n".encode())
    return digest.hexdigest()

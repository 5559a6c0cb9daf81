"""Shared memory between processes of one host, on GPUs and CPUs.

GPU memory is allocated by the driver, not by torch, whose allocator may map it from pieces (expandable segments, or an
engine's pieces that are unmapped when it sleeps), which cannot be shared as a whole (pytorch#130330). CPU memory is
anonymous and is freed with the process.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import struct
from typing import Any

import torch

HANDLE_BYTES = 64


def can_share(device: torch.device) -> bool:
    """Return whether a device's memory can be shared; on a GPU this needs CUDA's driver API."""
    return device.type != "cuda" or all(importlib.util.find_spec(name) for name in ("cuda", "cuda.bindings"))


class Shared:
    """Memory of this process that others may map.

    Args:
        num_bytes: Size.
        device: Its device.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self._pointer, self._file = 0, -1
        if device.type == "cuda":
            driver = _driver(device)
            self._pointer = int(_done(driver.cuMemAlloc(num_bytes)))
            handle = _done(driver.cuIpcGetMemHandle(self._pointer))
            self.handle = bytes(handle.reserved)
            self.values = _on_gpu(self._pointer, num_bytes, device)
        else:
            self._file = os.memfd_create("weights")
            os.ftruncate(self._file, num_bytes)
            self.handle = struct.pack("qqq", os.getpid(), self._file, num_bytes).ljust(HANDLE_BYTES, b"\0")
            self.values = _on_host(self._file, num_bytes)

    def close(self) -> None:
        """Free the memory; no other process may still map it."""
        if self._pointer:
            _done(_driver(self.values.device).cuMemFree(self._pointer))
        else:
            os.close(self._file)
        self._pointer, self.values = 0, torch.empty(0, dtype=torch.uint8)


class Mapped:
    """Mapped memory of another process.

    Args:
        handle: Handle of the other's `Shared`, [64] bytes.
        num_bytes: Bytes to map.
        device: The device in this process.
    """

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device):
        self._pointer, self._device = 0, device
        if device.type == "cuda":
            driver = _driver(device)
            opened = driver.CUipcMemHandle()
            opened.reserved = handle
            flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            self._pointer = int(_done(driver.cuIpcOpenMemHandle(opened, flag)))
            self.values = _on_gpu(self._pointer, num_bytes, device)
        else:
            process, file, size = struct.unpack_from("qqq", handle)
            opened_file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            try:
                self.values = _on_host(opened_file, size)
            finally:
                os.close(opened_file)

    def close(self) -> None:
        """Unmap the memory."""
        if self._pointer:
            _done(_driver(self._device).cuIpcCloseMemHandle(self._pointer))
        self._pointer, self.values = 0, torch.empty(0, dtype=torch.uint8)


class _Pointer:
    """Describes external memory to torch."""

    def __init__(self, pointer: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _on_gpu(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Pointer(pointer, num_bytes), device=device)


def _on_host(file: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def _driver(device: torch.device) -> Any:
    """Return CUDA's driver API, with a device current in this thread."""
    from cuda.bindings import driver

    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    return driver


def _done(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver call.

    Raises:
        RuntimeError: The call failed.
    """
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None


def notice_of(shared: Shared, begins: list[int]) -> torch.Tensor:
    """Return a notice of the messages' places, [bytes] uint8.

    Args:
        shared: The memory.
        begins: Offset of each message.
    """
    numbers = struct.pack(f"{1 + len(begins)}q", len(shared.values), *begins)
    return torch.frombuffer(bytearray(shared.handle + numbers), dtype=torch.uint8)


def empty_notice(num_messages: int) -> torch.Tensor:
    """Return an empty buffer for a notice of so many messages."""
    return torch.empty(HANDLE_BYTES + 8 * (1 + num_messages), dtype=torch.uint8)


def read_notice(notice: torch.Tensor) -> tuple[bytes, int, list[int]]:
    """Return the memory's handle and size, and the messages' offsets."""
    octets = notice.numpy().tobytes()
    size, *begins = struct.unpack(f"{(len(octets) - HANDLE_BYTES) // 8}q", octets[HANDLE_BYTES:])
    return octets[:HANDLE_BYTES], size, begins

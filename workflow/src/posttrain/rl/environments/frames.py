"""Frames between the trainer and environment workers: the length in 8 bytes, then JSON."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!Q")
# Limit on an environment's answer: an observation is text that a model reads.
MAX_ANSWER_BYTES = 16 << 20


def frame_of(content: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a frame.

    Args:
        content: JSON types; NaN and infinities are written, too, so that the reader can name them.
        default: Converts other types, see `json.dumps`.

    Raises:
        TypeError, ValueError, RecursionError: It is not JSON, or its text is not UTF-8.
    """
    packed = json.dumps(content, ensure_ascii=False, default=default).encode()
    return HEADER.pack(len(packed)) + packed


async def read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Return the content of the next frame.

    Raises:
        IncompleteReadError, ConnectionError: The other side has ended.
        ValueError: The frame is larger than `most` bytes.
    """
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if most is not None and size > most:
        raise ValueError(f"a frame of {size} bytes")
    return await reader.readexactly(size)

"""Reads responses of untrusted addresses: with a size limit, as JSON, and without following redirects.

Clients request no compression and decompress nothing, so the size limit holds in memory. They follow no redirect,
because a token, a prompt or a measurement belongs to the address that the user named.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any

# Enough for lists, numbers and grades; larger responses need an explicit limit.
MAX_ANSWER_BYTES = 16 << 20
# Keeps HTML pages out of the log.
MAX_ERROR_BYTES, MAX_ERROR_CHARACTERS = 1 << 16, 1000
PLAIN = {"Accept-Encoding": "identity"}
# Exceptions raised by a response of unexpected form.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


class OversizedAnswerError(ValueError):
    """The response is larger than the limit."""


async def read_bounded(chunks: AsyncIterable[bytes], most: int = MAX_ANSWER_BYTES) -> bytes:
    """Return a whole response.

    Args:
        chunks: Its bytes as they arrive.
        most: The size limit in bytes.

    Raises:
        OversizedAnswerError: The response exceeds the limit; the rest is not read.
    """
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) > most:
            raise OversizedAnswerError(f"an answer of more than {most} bytes")
    return bytes(answer)


async def read_error(chunks: AsyncIterable[bytes]) -> str:
    """Return the beginning of an error response."""
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) >= MAX_ERROR_BYTES:
            break
    return answer[:MAX_ERROR_BYTES].decode(errors="replace")


def parse_json(content: bytes | str) -> Any:
    """Return the content of a response.

    Raises:
        ValueError: The response is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def redirect_of(status: int, headers: Mapping[str, str]) -> str:
    """Return the target of a redirect and the remedy; "" for any other response.

    Example:
        "redirects to 'http://other:1/', which is not followed: name the address itself".
    """
    place = headers.get("Location", "") if 300 <= status < 400 else ""
    return f"redirects to {place[:200]!r}, which is not followed: name the address itself" if place else ""


async def read_refusal(status: int, headers: Mapping[str, str], chunks: AsyncIterable[bytes]) -> str:
    """Return the status of a failed response, with its redirect or the beginning of its text."""
    return f"HTTP {status}: {redirect_of(status, headers) or (await read_error(chunks))[:MAX_ERROR_CHARACTERS]}"

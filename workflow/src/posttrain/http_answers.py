"""Reads what an address answers, which may be anything: bounded in bytes, JSON or nothing, and never from elsewhere.

Clients ask for no compression and undo none, so that what is counted is what is kept. They follow no redirect: a
token, a prompt or a measurement belongs to the address that the user has named.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any

# Lists, figures and grades; who expects more says so.
MAX_ANSWER_BYTES = 16 << 20
# A page of HTML fits into no log.
MAX_ERROR_BYTES, MAX_ERROR_CHARACTERS = 1 << 16, 1000
PLAIN = {"Accept-Encoding": "identity"}
# Exceptions of reading an answer in an unexpected form.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


class OversizedAnswerError(ValueError):
    """More came than is read."""


async def read_bounded(chunks: AsyncIterable[bytes], most: int = MAX_ANSWER_BYTES) -> bytes:
    """Return a whole answer.

    Args:
        chunks: Its bytes as they come.
        most: The largest answer in bytes.

    Raises:
        OversizedAnswerError: It is larger; no more is read.
    """
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) > most:
            raise OversizedAnswerError(f"an answer of more than {most} bytes")
    return bytes(answer)


async def read_error(chunks: AsyncIterable[bytes]) -> str:
    """Return the beginning of an answer that tells an error."""
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) >= MAX_ERROR_BYTES:
            break
    return answer[:MAX_ERROR_BYTES].decode(errors="replace")


def parse_json(content: bytes | str) -> Any:
    """Return the content of an answer.

    Raises:
        ValueError: It is no JSON, or nested too deep to be read.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def redirect_of(status: int, headers: Mapping[str, str]) -> str:
    """Return where a redirect leads and what to do about it; "" for any other answer.

    Example:
        "redirects to 'http://other:1/', which is not followed: name the address itself".
    """
    place = headers.get("Location", "") if 300 <= status < 400 else ""
    return f"redirects to {place[:200]!r}, which is not followed: name the address itself" if place else ""


async def read_refusal(status: int, headers: Mapping[str, str], chunks: AsyncIterable[bytes]) -> str:
    """Return what an answer without success says: its status, and where it leads or the beginning of its text."""
    return f"HTTP {status}: {redirect_of(status, headers) or (await read_error(chunks))[:MAX_ERROR_CHARACTERS]}"

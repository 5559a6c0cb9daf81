"""Calls of an environment over HTTP. Each has a deadline; none is sent twice, because a call changes the episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from posttrain.errors import one_line
from posttrain.http_answers import MAX_ERROR_CHARACTERS, PLAIN, OversizedAnswerError, read_bounded, read_refusal
from posttrain.rl.environments.frames import MAX_ANSWER_BYTES
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.store import parse_json

KINDS = ("error", "deadline", "crash")


class HttpCalls:
    """The connection of one episode, with its own cookies.

    Args:
        url: "http://host:port", perhaps with a path.
        deadline_seconds: Time limit of a call.
    """

    def __init__(self, url: str, deadline_seconds: float):
        self._url, self._deadline = url.rstrip("/"), deadline_seconds
        self._session: aiohttp.ClientSession | None = None

    @property
    def cookies(self) -> dict[str, str]:
        """The cookies that the service has set."""
        return {cookie.key: cookie.value for cookie in self._session.cookie_jar} if self._session else {}

    async def post(self, path: str, body: Any) -> Any:
        """Return the JSON that a request is answered with.

        Args:
            path: Below the address, such as "/step".
            body: JSON types.

        Raises:
            EnvironmentFailure: The service failed, cannot be reached, or did not answer in time.
        """
        _, content = await self.ask(path, body)
        try:
            return parse_json(content)
        except ValueError as error:
            raise EnvironmentFailure("error", f"the answer to {path} is not JSON: {error}") from error

    async def ask(self, path: str, body: Any, statuses: Sequence[int] = (200,)) -> tuple[int, bytes]:
        """Return the status and the content that a request is answered with.

        Args:
            path: Below the address.
            body: JSON types.
            statuses: Any other is a failure.

        Raises:
            EnvironmentFailure: The service failed, cannot be reached, or did not answer in time.
        """
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailure("error", f"the request to {path} is not JSON: {error}") from error
        try:
            async with asyncio.timeout(self._deadline):
                return await self._ask(path, content, statuses)
        except TimeoutError as error:
            raise EnvironmentFailure("deadline", f"{path} was not answered within {self._deadline:g} s") from error
        except OversizedAnswerError as error:
            raise EnvironmentFailure("error", f"{path}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailure("crash", f"{path}: {type(error).__name__}: {one_line(error)}") from error

    async def _ask(self, path: str, content: bytes, statuses: Sequence[int]) -> tuple[int, bytes]:
        if self._session is None:
            # Cookies of addresses without a name, too.
            timeout, jar = aiohttp.ClientTimeout(total=None), aiohttp.CookieJar(unsafe=True)
            self._session = aiohttp.ClientSession(timeout=timeout, cookie_jar=jar, headers=PLAIN)
        headers = {"Content-Type": "application/json"}
        post = self._session.post(self._url + path, data=content, headers=headers, allow_redirects=False)
        async with post as response:
            chunks = response.content.iter_any()
            if response.status in statuses:
                return response.status, await read_bounded(chunks, MAX_ANSWER_BYTES)
            if "json" in response.content_type and not 300 <= response.status < 400:
                raise _stated(path, response.status, await read_bounded(chunks))
            reason = await read_refusal(response.status, response.headers, chunks)
            raise EnvironmentFailure(_kind_of(response.status), f"{path}: {one_line(reason)}")

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()


def _stated(path: str, status: int, content: bytes) -> EnvironmentFailure:
    """Return the failure that a service states: {"kind", "reason"}, or any other JSON."""
    try:
        stated = parse_json(content)
    except ValueError:
        stated = None
    if isinstance(stated, dict) and stated.get("kind") in KINDS and isinstance(stated.get("reason"), str):
        return EnvironmentFailure(stated["kind"], one_line(stated["reason"])[:MAX_ERROR_CHARACTERS])
    shown = one_line(content[:MAX_ERROR_CHARACTERS].decode(errors="replace"))
    return EnvironmentFailure(_kind_of(status), f"{path}: HTTP {status}: {shown}")


def _kind_of(status: int) -> str:
    return "crash" if status >= 500 else "error"

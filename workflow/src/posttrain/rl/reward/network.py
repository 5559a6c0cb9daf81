"""HTTP client for remote graders.

- The number of concurrent requests is limited over all callers.
- A request has a deadline that includes its retries.
- Only connection failures and statuses 429 and 5xx are retried. `Retry-After` is obeyed as far as the deadline allows.
- A retried request has the same `Idempotency-Key`: the digest of its body.
- Errors become a `Failure`, whose text never contains the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from httpx2 import AsyncClient, HTTPError, Limits

from posttrain.checkpoint.hub.retries import CUT, BadStatus, GaveUp, Retries, RetryRule
from posttrain.config.services import Address
from posttrain.errors import one_line
from posttrain.http_answers import PLAIN, parse_json, read_bounded, read_error, redirect_of
from posttrain.plan.preflight.reward_tokens import token_of
from posttrain.rl.reward.answer import Failure

# Characters of an unexpected answer in messages.
MAX_TOLD_CHARACTERS = 300
RETRIED_STATUSES = (429, *range(500, 600))
FIRST_WAIT_SECONDS = 0.5


class AddressClient:
    """Client of one address.

    Args:
        section: Section of the configuration, for messages.
        address: URL, deadline and retries.
        path: Path below the URL.

    Raises:
        ConfigError: The token is not in the environment.
    """

    def __init__(self, section: str, address: Address, path: str = ""):
        self._section, self._settings, self._url = section, address, address.url + path
        self._token = token_of(section, address)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def ask_all(self, bodies: Sequence[Any]) -> list[Any]:
        """Post each body.

        Args:
            bodies: JSON types.

        Returns:
            The answer to each, JSON types or a `Failure`, in the order of the bodies.
        """
        headers = {"Content-Type": "application/json", **PLAIN}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        limits = Limits(max_connections=self._settings.max_requests)
        async with AsyncClient(headers=headers, timeout=None, limits=limits, verify=_certificates()) as client:
            return list(await asyncio.gather(*(self._ask(client, body) for body in bodies)))

    def told(self, text: object) -> str:
        """Return an answer's text for messages: short, one line, without the token."""
        shown = str(text).replace(self._token, "***") if self._token else str(text)
        shown = one_line(shown)
        return shown if len(shown) <= MAX_TOLD_CHARACTERS else f"{shown[:MAX_TOLD_CHARACTERS]}..."

    async def _ask(self, client: AsyncClient, body: Any) -> Any:
        # A semaphore is bound to the event loop that first awaits it.
        turns = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._settings.max_requests))
        deadline = self._settings.deadline_seconds
        async with turns:
            try:
                async with asyncio.timeout(deadline) as limit:
                    return await self._ask_until(client, json.dumps(body).encode(), limit)
            except TimeoutError as error:
                why = f"; {error}" if str(error) else ""
                return Failure("deadline", f"no answer within {deadline:g} s{why}")
            except GaveUp as error:
                return Failure("connection", f"{self._reason(error.__cause__)}; {error}")
            except (BadStatus, HTTPError, ValueError) as error:
                return Failure("error", self._reason(error))

    async def _ask_until(self, client: AsyncClient, content: bytes, limit: asyncio.Timeout) -> Any:
        rule = RetryRule(self._settings.num_retries, FIRST_WAIT_SECONDS, busy_statuses=RETRIED_STATUSES)
        retries = Retries(rule, self._section)
        while True:
            try:
                return await self._ask_once(client, content)
            except BadStatus as error:
                seconds, why = retries.seconds_after(error), self._reason(error)
            except CUT as error:
                # The error, which is logged, may quote a malformed line of the answer: `told` shortens and redacts it.
                seconds, why = retries.seconds_after(type(error)(self.told(error))), self._reason(error)
            if asyncio.get_running_loop().time() + seconds > (limit.when() or 0):
                raise TimeoutError(why)
            await asyncio.sleep(seconds)

    async def _ask_once(self, client: AsyncClient, content: bytes) -> Any:
        headers = {"Idempotency-Key": hashlib.sha256(content).hexdigest()}
        async with client.stream("POST", self._url, content=content, headers=headers) as response:
            if response.is_success:
                return parse_json(await read_bounded(response.aiter_raw()))
            said = await read_error(response.aiter_raw())
        error = BadStatus(response.status_code, response.headers.get("Retry-After", ""))
        error.add_note(redirect_of(response.status_code, response.headers) or said)
        raise error

    def _reason(self, error: BaseException | None) -> str:
        said = "".join(getattr(error, "__notes__", ()))
        if isinstance(error, BadStatus):
            return self.told(f"{error}: {said}" if said else error)
        kind = "no JSON" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return self.told(f"{kind}: {error}")


@lru_cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificate authorities, cached because reading them is slow."""
    return ssl.create_default_context()

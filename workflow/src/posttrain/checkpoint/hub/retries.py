"""How often something is asked again that may well work next time, and how long is waited between.

A server that is busy says when to come back (`Retry-After`); else the wait doubles from one failure to the next. What
arrives meanwhile counts as success: only failures in a row, without a byte between them, use the attempts up.
"""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from httpx2 import NetworkError, ProxyError, RemoteProtocolError, TimeoutException
from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger(__name__)

# Too many requests, a request that took too long, and what servers say that are overloaded or restarted.
BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
# Connections that could not be made, were cut or fell silent.
CUT = (NetworkError, ProxyError, RemoteProtocolError, TimeoutException)
# A server that asks for more patience is left alone: the user had better know.
LONGEST_RETRY_AFTER_SECONDS = 900.0


@dataclass(frozen=True)
class RetryRule:
    """When to give up.

    Args:
        num_retries: Attempts after the first one that fail without a byte between them.
        first_wait_seconds: Before the first of them; doubled for each next one.
        longest_wait_seconds: Upper limit of that; not of what a server asks for.
        busy_statuses: HTTP statuses after which asking again may help.
    """

    num_retries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    busy_statuses: Collection[int] = BUSY_STATUSES


class BadStatus(RuntimeError):
    """An answer with a status that is no success.

    Args:
        status: HTTP status.
        retry_after: The header of that name; "" without one.
        content_server: Who answered, where that is not the Hub itself.
    """

    def __init__(self, status: int, retry_after: str = "", content_server: str = ""):
        super().__init__(f"HTTP {status}")
        self.status, self.retry_after, self.content_server = status, retry_after, content_server


class GaveUp(RuntimeError):
    """Tried as often as allowed; the cause is the last failure."""


class Retries:
    """The failures of one piece of work in a row.

    Args:
        rule: When to give up.
        what: Named in the log.
        pause: Waits for some seconds; may raise to end the work.
    """

    def __init__(self, rule: RetryRule, what: str, pause: Callable[[float], None] = time.sleep):
        self._rule, self._what, self._pause = rule, what, pause
        self._failures = 0

    def wait_after(self, error: Exception, made_progress: bool = False) -> None:
        """Wait until the next attempt, or raise when there is none left: see `seconds_after`."""
        self._pause(self.seconds_after(error, made_progress))

    def seconds_after(self, error: Exception, made_progress: bool = False) -> float:
        """Return how long to wait until the next attempt, or raise when there is none left.

        Args:
            error: Why the attempt failed.
            made_progress: Bytes arrived since the last failure.

        Raises:
            Exception: `error` itself when trying again is no use.
            GaveUp: From `error`, when it was tried as often as the rule allows.
        """
        status = status_of(error)
        if not (isinstance(error, CUT) or status in self._rule.busy_statuses):
            raise error
        self._failures = 1 if made_progress else self._failures + 1
        asked, limit = _retry_after(error), self._rule.num_retries
        if self._failures > limit or (asked or 0) > LONGEST_RETRY_AFTER_SECONDS:
            again = f"; it asks to wait for {asked:.0f} s" if asked else ""
            raise GaveUp(f"{self._failures} attempts{again}") from error
        doubled = self._rule.first_wait_seconds * 2 ** (self._failures - 1)
        seconds = asked if asked is not None else min(doubled, self._rule.longest_wait_seconds)
        reason = f"HTTP {status}" if status else f"{type(error).__name__}: {error}"
        log.warning("%s: %s; retry %d of %d in %.1f s", self._what, reason, self._failures, limit, seconds)
        return seconds


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error, None when there was no answer."""
    if isinstance(error, BadStatus):
        return error.status
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after(error: Exception) -> float | None:
    """Return how many seconds the server asks to wait, given as a number or as a date."""
    if isinstance(error, BadStatus):
        text = error.retry_after
    else:
        text = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None

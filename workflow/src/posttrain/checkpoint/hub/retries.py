"""Retry rules for transient network errors.

A busy server sets the wait (`Retry-After`); otherwise the wait doubles with each failure. Received bytes reset the
count: only consecutive failures without a byte use up the attempts.
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

# Rate limits, timeouts, and the statuses of overloaded or restarting servers.
BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
# Connections that failed, were cut or timed out.
CUT = (NetworkError, ProxyError, RemoteProtocolError, TimeoutException)
# A longer `Retry-After` ends the retries and is reported to the user.
LONGEST_RETRY_AFTER_SECONDS = 900.0


@dataclass(frozen=True)
class RetryRule:
    """Retry limits.

    Args:
        num_retries: Consecutive failures without a byte, after the first attempt.
        first_wait_seconds: Wait before the first retry; doubled for each next one.
        longest_wait_seconds: Upper limit of that wait; does not limit `Retry-After`.
        busy_statuses: HTTP statuses that are retried.
    """

    num_retries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    busy_statuses: Collection[int] = BUSY_STATUSES


class BadStatus(RuntimeError):
    """A response with an error status.

    Args:
        status: HTTP status.
        retry_after: The header of that name; "" without one.
        content_server: The server that answered, if it is not the Hub.
    """

    def __init__(self, status: int, retry_after: str = "", content_server: str = ""):
        super().__init__(f"HTTP {status}")
        self.status, self.retry_after, self.content_server = status, retry_after, content_server


class GaveUp(RuntimeError):
    """All attempts failed; the cause is the last failure."""


class Retries:
    """Consecutive failures of one operation.

    Args:
        rule: Retry limits.
        what: Name for the log.
        pause: Waits for some seconds; may raise to end the operation.
    """

    def __init__(self, rule: RetryRule, what: str, pause: Callable[[float], None] = time.sleep):
        self._rule, self._what, self._pause = rule, what, pause
        self._failures = 0

    def wait_after(self, error: Exception, made_progress: bool = False) -> None:
        """Wait until the next attempt, or raise if none is left; see `seconds_after`."""
        self._pause(self.seconds_after(error, made_progress))

    def seconds_after(self, error: Exception, made_progress: bool = False) -> float:
        """Return the seconds until the next attempt, or raise if none is left.

        Args:
            error: The failure.
            made_progress: Whether bytes arrived since the last failure.

        Raises:
            Exception: `error` itself if it cannot be retried.
            GaveUp: From `error`, after the last attempt.
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
    """Return the HTTP status of an error; None without a response."""
    if isinstance(error, BadStatus):
        return error.status
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after(error: Exception) -> float | None:
    """Return the seconds in `Retry-After`, which holds a number or a date."""
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

"""Runs programs where a configuration says: here, or at a sandbox service."""

from __future__ import annotations

import json

from httpx2 import AsyncClient, HTTPError, Timeout

from posttrain.config.sandbox import SandboxSettings
from posttrain.errors import one_line
from posttrain.http_answers import MALFORMED, PLAIN, parse_json, read_bounded, read_refusal
from posttrain.sandbox.messages import MAX_OUTPUT_KIB, PATH, authorization, read_answer, request_of, shared_secret
from posttrain.sandbox.program import Limits, Program, Result, Runner, SandboxUnavailable
from posttrain.sandbox.run import run

CONNECT_SECONDS = 10.0
# A program may wait at the service for others to end.
QUEUE_SECONDS = 600.0
_MAX_ANSWER_BYTES = 4 * (MAX_OUTPUT_KIB << 10)


def runner_of(settings: SandboxSettings) -> Runner:
    """Return what runs programs for a configuration.

    Raises:
        ConfigError: A service is named, and the environment has no secret for it.
    """
    return SandboxClient(settings.address, shared_secret()).run if settings.address else run


class SandboxClient:
    """Client of a sandbox service.

    Args:
        address: Its address, `http://host:port`.
        secret: What it is shown.
    """

    def __init__(self, address: str, secret: str):
        self._url = address.rstrip("/") + PATH
        self._headers = {"Content-Type": "application/json", **authorization(secret), **PLAIN}

    async def run(self, program: Program, limits: Limits) -> Result:
        """Run a program at the service, as `posttrain.sandbox.run.run` does here.

        Raises:
            SandboxUnavailable: The service cannot be reached, refuses, or has no sandbox.
        """
        timeout = Timeout(CONNECT_SECONDS, read=limits.seconds + QUEUE_SECONDS)
        content = json.dumps(request_of(program, limits)).encode()
        try:
            async with (
                AsyncClient(headers=self._headers, timeout=timeout) as client,
                client.stream("POST", self._url, content=content) as response,
            ):
                if not response.is_success:
                    refusal = await read_refusal(response.status_code, response.headers, response.aiter_raw())
                    raise SandboxUnavailable(f"the sandbox service at {self._url}: {one_line(refusal)}")
                return read_answer(parse_json(await read_bounded(response.aiter_raw(), _MAX_ANSWER_BYTES)))
        except (HTTPError, *MALFORMED) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            remedy = "start it there with `python -m posttrain.sandbox.serve`, or correct sandbox.address"
            raise SandboxUnavailable(
                f"no answer from the sandbox service at {self._url} ({reason}): {remedy}"
            ) from error

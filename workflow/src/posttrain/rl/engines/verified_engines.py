"""Verifies that engines serve the exported weights before a measurement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from posttrain.checkpoint.formats.hf_architecture import precision_of
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.reference_logprobs import read_reference_logprobs
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, raise_if_any
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, client_of
from posttrain.rl.engines.reference_logprobs import hold, near

log = logging.getLogger(__name__)

# Callers have waited until engines are healthy, or know that they run.
HEALTHY_SECONDS = 30.0


@asynccontextmanager
async def verified_engines(
    config: Config, engines: EngineEndpoints, checkpoint: Path, has_chat: bool = False
) -> AsyncIterator[EngineClient]:
    """Yield a client like `client_of`, after comparing each engine with the checkpoint's reference log-probabilities.

    Args:
        config: The engines' configuration.
        engines: The engines.
        checkpoint: The checkpoint that they must serve, in Hub layout.
        has_chat: Requests are conversations, which the engine renders.

    Raises:
        ConfigError: Engines serve other weights; names each.
        RuntimeError: An engine is not ready in time, has ended, or does not answer.
    """
    async with client_of(config, engines) as client:
        await verify_all(engines.urls, engines.secret, checkpoint, has_chat)
        yield client


async def verify_all(urls: Sequence[str], secret: str, checkpoint: Path, has_chat: bool) -> None:
    """Compare servers with the checkpoint's reference log-probabilities; a base model has none and is not compared.

    Raises:
        ConfigError: Servers serve other weights (names each), or the precision is unknown.
        CheckpointError: The reference log-probabilities or `config.json` cannot be read.
        RuntimeError: A server does not answer.
    """
    canary = read_reference_logprobs(checkpoint)
    if canary is None:
        log.info("nothing to compare with what is served: %s is no export of a training", checkpoint)
        return
    path = checkpoint / "config.json"
    precision = precision_of(read_object(path), str(path))
    asked = [hold(url, secret, canary, precision, HEALTHY_SECONDS, has_chat=has_chat) for url in urls]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for failure in failures:
        if not isinstance(failure, ConfigError):
            raise failure
    raise_if_any([problem for failure in failures if isinstance(failure, ConfigError) for problem in failure.problems])
    for url, held in zip(urls, answers, strict=True):
        assert not isinstance(held, BaseException)
        log.info("%s serves %s: %s", url, checkpoint, near(held))

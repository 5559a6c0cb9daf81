"""Finds the engines of a step: the surrounding job's, external ones by address, or its own on this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.external_engines import ExternalEngines
from posttrain.rl.engines.process import check_all_alive, running_engines
from posttrain.rl.engines.secret import ENGINES_VARIABLE, take_secret


@dataclass(frozen=True)
class EngineEndpoints:
    """Engines that may be used once they are ready.

    Args:
        urls: Engine URLs.
        secret: Their shared secret.
        check_alive: Raises if an engine is known to have ended.
        to_load: Checkpoint that external engines must serve; None: they were started with it.
    """

    urls: Sequence[str]
    secret: str
    check_alive: Callable[[], None] = lambda: None
    to_load: Path | None = None


@contextmanager
def engines_to_ask(
    config: Config, checkpoint: Path, log_folder: Path, merge_requests: bool = False
) -> Iterator[EngineEndpoints]:
    """Find engines that serve a checkpoint for this step, or start them; started engines end with the block.

    Args:
        config: The engines' configuration.
        checkpoint: Checkpoint in Hub layout.
        log_folder: Logs of started engines.
        merge_requests: See `running_engines`.

    Raises:
        ConfigError: See `running_engines`; or the secret of external engines is missing.
    """
    if urls := os.environ.pop(ENGINES_VARIABLE, "").split():
        yield EngineEndpoints(urls, take_secret())
        return
    if addresses := config.evaluation.addresses:
        yield EngineEndpoints([f"http://{address}" for address in addresses], take_secret(), to_load=checkpoint)
        return
    with running_engines(config, checkpoint, log_folder, merge_requests) as engines:
        yield EngineEndpoints([engine.url for engine in engines], engines[0].secret, partial(check_all_alive, engines))


@asynccontextmanager
async def client_of(config: Config, engines: EngineEndpoints) -> AsyncIterator[EngineClient]:
    """Yield a client of the engines once they are ready.

    Raises:
        RuntimeError: An engine is not ready in time, has ended, or is not admissible.
    """
    timeout, vocab_size = config.engine.request_timeout_seconds, config.model.architecture.vocab_size
    if engines.to_load:
        client: EngineClient = ExternalEngines(engines.urls, engines.secret, timeout, engines.to_load, vocab_size)
    else:
        client = EngineClient(engines.urls, engines.secret, timeout, vocab_size=vocab_size)
    async with client:
        await client.wait_ready(config.engine.start_timeout_seconds, engines.check_alive)
        yield client

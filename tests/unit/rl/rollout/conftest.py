"""What plays a story with scripted engines and a `TrajectoryGenerator`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.scripted_engines import CONFIG, PROMPTS, SETTINGS, Engine, Story

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.environments.protocol import Environments
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(256)
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids([*STOP_TOKENS])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(folder)


@pytest.fixture
def play(tokenizer: ChatTokenizer, tmp_path: Path) -> Callable[..., None]:
    """Return what runs a story with some engines, and settings on top of the usual ones."""

    async def run(
        story: Story, engines: tuple[Engine, ...], environments: Environments | None, settings: dict[str, Any]
    ) -> None:
        words = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
        overrides = " ".join(f"{key}={value}" for key, value in words.items())
        config = resolve({"model": "tiny", "site": "local", "set": overrides}, CONFIG).config
        servers = []
        for engine in engines:
            application = web.Application()
            application.router.add_post("/generate", engine.generate)
            application.router.add_route("*", "/{path:.*}", engine.other)
            servers.append(TestServer(application))
            await servers[-1].start_server()
        urls = [str(server.make_url("")).rstrip("/") for server in servers]
        store = QueueStore(tmp_path / "rollouts")
        try:
            with GraderPool.of(config) as graders:
                async with EngineClient(urls, "secret", 10.0) as client:
                    generator = TrajectoryGenerator(config, PROMPTS, tokenizer, client, store, graders, environments)
                    await story(generator, store)
        finally:
            for server in servers:
                await server.close()

    def play(story: Story, *engines: Engine, environments: Environments | None = None, **settings: Any) -> None:
        asyncio.run(asyncio.wait_for(run(story, engines, environments, settings), 60))

    return play

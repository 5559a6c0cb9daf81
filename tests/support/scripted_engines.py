"""An engine that answers `/generate` as a script says, and the settings of runs with it."""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.routes import ASKED, TOLD, RoutesLayout
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import Prompt

CONFIG = Path(__file__).parents[2] / "config"
SETTINGS = {
    "rollout.rollout_batch_size": 2,
    "rollout.num_samples_per_prompt": 2,
    "rollout.max_response_tokens": 6,
    "training.global_batch_size": 4,
    "training.num_steps": 4,
    "training.seed": 42,
    "rollout.max_staleness": 1,
    "algorithm.preset": "tis",
}
PROMPTS = [Prompt(number, ({"role": "user", "content": f"say {number}"},), "7") for number in range(8)]
DIGIT = CHARACTERS.index("7")


Story = Callable[[TrajectoryGenerator, QueueStore], Coroutine[Any, Any, None]]


class Engine:
    """Answers requests with `answers` in turn, then with one digit; "die" ends the connection."""

    logprob = -0.5

    def __init__(self, *answers: Any):
        self.answers, self.asked = [*answers], list[dict[str, Any]]()
        self.version = "0"

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        tokens, reason = self.answer(body)
        if reason == "die":
            request.transport.close()
        meta = {"finish_reason": {"type": reason}, "weight_version": self.version}
        meta["output_token_logprobs"] = [[self.logprob, token, None] for token in tokens]
        meta |= self.more(body, tokens)
        return web.json_response([{"output_ids": tokens, "meta_info": meta}])

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        return self.answers.pop(0) if self.answers else ([DIGIT], "stop")

    def more(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        """Return what else `meta_info` says of a response."""
        return {}

    async def other(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "status": "ok"})


class RoutedEngine(Engine):
    """Reports experts that depend on the request's seed, of all tokens that it has read."""

    def more(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        if not (tokens and body.get(ASKED)):
            return {}
        seed, num_read = body["sampling_params"][0]["sampling_seed"], len(body["input_ids"][0]) + len(tokens) - 1
        return {TOLD: base64.b64encode(routes_of(seed, num_read).tobytes()).decode()}


@functools.cache
def layout_of_tiny() -> RoutesLayout:
    return RoutesLayout.of(resolve({"model": "tiny", "site": "local"}, CONFIG).config.model.architecture)


def routes_of(seed: int, num_tokens: int) -> np.ndarray:
    """Return experts [tokens, decoder layers, experts of a token] of the tokens that an engine reads."""
    layout = layout_of_tiny()
    drawn = np.random.default_rng(seed)
    routes = np.zeros((num_tokens, layout.num_layers, layout.per_token), np.uint8)
    for token, layer in itertools.product(range(num_tokens), range(layout.first, layout.num_layers)):
        routes[token, layer] = drawn.choice(layout.num_experts, layout.per_token, replace=False)
    return routes


class HoldingEngine(Engine):
    """Holds every other one of its first four requests until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        answer = await super().generate(request)
        if len(self.asked) in (1, 3):
            await self.released.wait()
        return answer

"""Plays scripted episodes with verifiers; runs in the environment of that library, without posttrain.

Usage: python verifiers_player.py SCRIPT     prints a JSON list, one object per episode

A script is a JSON list of episodes: `folder` (a tokenizer), `renderer` (its settings), `messages`, `tools`, `responses`
(a list of `tokens`, `logprobs` and `finish_reason`), `observations` (a list of messages after each response but the
last), `rewards` by name, and perhaps `fork`: messages with which a second conversation goes on after the first
response. The model is an endpoint of this process that answers with the responses in turn, or the one whose address is
`model`, greedy, with 8 tokens a response.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ScriptedHarness"]


class EpisodeData(vf.TaskData):
    """An episode of the script."""

    tools: list[dict[str, Any]] | None = None
    observations: list[list[dict[str, Any]]]
    rewards: dict[str, float]
    fork: list[dict[str, Any]] | None = None


class EpisodeTask(vf.Task[EpisodeData]):
    """Grades it as the script says."""

    @vf.reward
    async def graded(self, trace: vf.Trace) -> dict[str, float]:
        """Return the script's rewards, by name."""
        return self.data.rewards


class ScriptedHarness(Harness[HarnessConfig]):
    """Posts the conversation, appends the answer and what the script observes, and posts again."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: EpisodeData,
    ) -> ProgramResult:
        """See `Harness`."""
        messages = [message.model_dump(exclude_none=True) for message in data.prompt]
        tools = {"tools": data.tools} if data.tools else {}
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:

            async def ask(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
                body = {"model": ctx.model, "messages": asked, **tools}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                return [*asked, answer.json()["choices"][0]["message"]]

            answered = first = await ask(messages)
            for observation in data.observations:
                answered = await ask([*answered, *observation])
            if data.fork:
                await ask([*first, *data.fork])
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Endpoint:
    """Answers `/inference/v1/generate` with responses in turn."""

    def __init__(self, responses: list[dict[str, Any]]):
        self._responses = [*responses]

    async def generate(self, request: web.Request) -> web.Response:
        """Answer the next response."""
        response = self._responses.pop(0)
        pairs = zip(response["tokens"], response["logprobs"], strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
        choice = {"token_ids": response["tokens"], "finish_reason": response["finish_reason"]}
        # Versions of weights, under the names that SGLang's answers have.
        versions = {"weight_version": "7", "meta_info": {"weight_version": "7"}}
        return web.json_response(
            {"request_id": "1", "choices": [{"index": 0, **choice, **versions, "logprobs": {"content": content}}]}
            | versions
        )

    async def models(self, request: web.Request) -> web.Response:
        """Name the model."""
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 100000}]})


async def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Return what verifiers has recorded of an episode."""
    responses = episode.pop("responses")
    if address := episode.pop("model", ""):
        return await play_with(episode, f"{address}/v1", {"temperature": 0.0, "max_tokens": 8})
    endpoint = Endpoint(responses)
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", endpoint.generate), web.get("/v1/models", endpoint.models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        return await play_with(episode, f"http://127.0.0.1:{port}/v1", None)
    finally:
        await runner.cleanup()


async def play_with(episode: dict[str, Any], address: str, sampling: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is recorded of an episode whose model is at an address."""
    client = TrainClientConfig(
        base_url=address,
        renderer=episode.pop("renderer"),
        renderer_model_name=episode.pop("folder"),
        api_key_var="MODEL_KEY",
    )
    seat = {"harness": {"id": "verifiers_player"}, "runtime": {"type": "subprocess"}, "sampling": sampling}
    config = AgentConfig(**seat, model="m", client=client)
    data = EpisodeData(prompt=episode.pop("messages"), **episode)
    return recorded(await vf.Agent(config).run(EpisodeTask(data)))


def recorded(trace: vf.Trace) -> dict[str, Any]:
    """Return what a trainer gets of a trace."""
    record = trace.to_record()
    return {
        "ok": trace.ok,
        "errors": [str(error) for error in trace.errors],
        "reward": trace.reward,
        "names_versions": "version" in json.dumps(record["nodes"]),
        "rounded": [value for node in record["nodes"] for value in node.get("logprobs") or []],
        "branches": [
            {
                "tokens": branch.token_ids,
                "mask": [int(mark) for mark in branch.sampled_mask],
                "logprobs": branch.logprobs,
            }
            for branch in trace.branches
        ],
    }


async def main() -> None:
    """Play the script's episodes."""
    script = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([await play(episode) for episode in script]))


if __name__ == "__main__":
    asyncio.run(main())

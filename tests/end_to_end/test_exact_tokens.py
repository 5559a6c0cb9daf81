"""Episodes on real engines: trained tokens are sampled tokens, with the probabilities of the model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file
from tests.support.hub_tensors import fill
from tests.support.megatron_single import CONFIG_DIR, initialize_single_rank
from tests.support.scripted_environments import ScriptedEnvironments
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from transformers import AutoModelForCausalLM

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, client_of, engines_to_ask
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.engines.secret import authorization
from posttrain.rl.environments.calculator import TOOL
from posttrain.rl.environments.protocol import Message, Observation
from posttrain.rl.rollout.episode import Episode, EpisodeRunner
from posttrain.rl.training.batch import pack_trajectories
from posttrain.types import Prompt, Trajectory
from posttrain_verifiers.engine import TokenEndpoint

# |engine - transformers| and |engine - trainer| in nats, of FP32 models.
BOUND = {"embedded": 1e-5, "sglang": 1e-4}
SGLANG = {"engine.kind": "sglang", "engine.python": PYTHON}
CALLS = {
    "qwen25": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>',
    "glm45": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2*3</arg_value>\n</tool_call>",
    "glm47": "<tool_call>calculator<arg_key>expression</arg_key><arg_value>2*3</arg_value></tool_call>",
}
# Episodes that the trainer also passes in BF16.
NUM_BF16 = 100
# Turns of one episode: (request, result).
Turns = list[tuple[GenerateRequest, GenerateResult]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_random_checkpoint(folder, TINY_QWEN3, seed=3)
    tokenizer = make_tokenizer(TINY_QWEN3.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    stops = {"eos_token_id": tokenizer.convert_tokens_to_ids([*STOP_TOKENS])}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | stops))
    return folder


def answer(number: int, action: Message) -> Observation:
    """Say how long the action was, for four turns."""
    return Observation(({"role": "user", "content": f"{len(action['content'])} : {number}"},), done=number == 3)


async def play_all(config: Config, checkpoint: Path, logs: Path, count: int) -> list[tuple[Episode, Turns]]:
    tokenizer, environments = ChatTokenizer(checkpoint), ScriptedEnvironments(answer)
    with engines_to_ask(config, checkpoint, logs, merge_requests=True) as engines:
        async with client_of(config, engines) as client:
            runner = EpisodeRunner(config, tokenizer, environments, client.parse_tool_calls)

            async def play(number: int) -> tuple[Episode, Turns]:
                turns: Turns = []

                async def respond(turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
                    seeded = dataclasses.replace(request, sampling_seed=1000 * turn + number)
                    turns.append((seeded, await client.sample(seeded, engine)))
                    return turns[-1][1]

                prompt = Prompt(number, ({"role": "user", "content": f"{number:04d}"},), "")
                return await runner.play(prompt, number, respond), turns

            played = await asyncio.gather(*map(play, range(count)))
            if config.engine.kind == "sglang":
                await check_parsers(client)
            return played


async def check_parsers(client: EngineClient) -> None:
    """SGLang's parsers read the calls of other models."""
    for parser, text in CALLS.items():
        content, (call,) = await client.parse_tool_calls(f"I compute. {text}", [TOOL], parser)
        assert (content.strip(), call["name"]) == ("I compute.", "calculator")
        assert json.loads(call["parameters"]) == {"expression": "2*3"}


def trainer_logprobs(config: Config, checkpoint: Path, episodes: Sequence[Episode]) -> torch.Tensor:
    """Return the trainer's log-probabilities of all sampled tokens, from packed rows of several episodes."""
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.train_step import compute_logprobs
    from posttrain.rl.megatron_backend.weights import HubWeights

    initialize_single_rank(config)
    policy = build_policy(config)
    tensors = [load_file(path) for path in checkpoint.glob("*.safetensors")]
    fill(HubWeights(policy.chunks, config.model.architecture), {name: part[name] for part in tensors for name in part})
    batches, _ = pack_trajectories(config, [*map(as_trajectory, episodes)], dp_rank=0)
    assert max(len(batch.trajectory_indices) for batch in batches) > 1
    found: dict[int, torch.Tensor] = {}
    for batch, row in zip(batches, compute_logprobs(policy, batches), strict=True):
        found |= batch.response_values(row)
    return torch.cat([found[index] for index in range(len(episodes))])


def as_trajectory(episode: Episode) -> Trajectory:
    return Trajectory(
        prompt_id=0,
        sample_index=0,
        tokens=episode.tokens,
        loss_mask=episode.loss_mask,
        logprobs=episode.logprobs,
        versions=episode.versions,
        finish_reason=episode.finish_reason,
        reward=1.0,
    )


def check_trainer(config: Config, checkpoint: Path, episodes: Sequence[Episode], bound: float) -> None:
    """In FP32 each token's difference has a bound; in BF16 the mean has the one that ends a training."""
    differences = {}
    for precision, some in (("fp32", episodes), ("bf16", episodes[:NUM_BF16])):
        there = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, params_dtype=precision))
        sampled = torch.tensor([value for episode in some for value in episode.logprobs])
        differences[precision] = (trainer_logprobs(there, checkpoint, some) - sampled).abs()
    largest, mean = float(differences["fp32"].max()), float(differences["bf16"].mean())
    print(f"trainer: largest {largest:.2g} nats in FP32, mean {mean:.2g} in BF16")
    assert largest <= bound
    assert bound < mean <= config.trainer.mismatch.bf16


def config_of(engine: str) -> Config:
    settings = {
        "data.environment": "calculator",
        "data.reward": "environment",
        "rollout.max_response_tokens": 160,
        "rollout.fp8": "false",
        **{f"model.architecture.{key}": value for key, value in dataclasses.asdict(TINY_QWEN3).items()},
        **(SGLANG if engine == "sglang" else {}),
    }
    words = " ".join(f"{key}={value}" for key, value in settings.items() if not isinstance(value, dict))
    return resolve({"model": "tiny_qwen3", "site": "local", "set": words}, CONFIG_DIR).config


@pytest.mark.parametrize(
    ("engine", "count"), [("embedded", 30), pytest.param("sglang", 100, marks=[pytest.mark.slow, pytest.mark.sglang])]
)
def test_trained_tokens_are_sampled_tokens(engine: str, count: int, checkpoint: Path, tmp_path: Path) -> None:
    if engine == "sglang":
        require_sglang()
    config = config_of(engine)
    played = asyncio.run(play_all(config, checkpoint, tmp_path / "logs", count))
    assert len(played) == count
    assert sum(len(turns) for _, turns in played) > 2 * count
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    largest = 0.0
    for episode, turns in played:
        sampled = [token for token, mark in zip(episode.tokens, episode.loss_mask, strict=True) if mark]
        assert sampled == [token for _, result in turns for token in result.output_ids]
        for request, result in turns:
            asked = len(request.input_ids)
            assert episode.tokens[:asked] == tuple(request.input_ids), "a turn is asked with other tokens"
            assert episode.tokens[asked : asked + len(result.output_ids)] == result.output_ids
            assert set(episode.loss_mask[asked : asked + len(result.output_ids)]) == {1}
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([episode.tokens])).logits[0].log_softmax(-1)
        places = [place for place, mark in enumerate(episode.loss_mask) if mark]
        expected = logprobs[[place - 1 for place in places], sampled]
        largest = max(largest, float((expected - torch.tensor(episode.logprobs)).abs().max()))
    print(f"{engine}: {count} episodes, {sum(len(turns) for _, turns in played)} turns, largest {largest:.2g} nats")
    assert largest <= BOUND[engine]
    check_trainer(config, checkpoint, [episode for episode, _ in played], BOUND[engine])


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang])])
def test_vllms_endpoint_in_front_of_an_engine(engine: str, checkpoint: Path, tmp_path: Path) -> None:
    """Tokens and log-probabilities are those of `/generate`; a wrong secret and unknown parameters are rejected."""
    if engine == "sglang":
        require_sglang()
    config = config_of(engine)

    async def ask(engines: EngineEndpoints) -> None:
        async with client_of(config, engines):  # waits until they are ready
            await ask_both(engines.urls[0], engines.secret)

    with engines_to_ask(config, checkpoint, tmp_path / "logs") as engines:
        asyncio.run(ask(engines))


async def ask_both(engine: str, secret: str) -> None:
    prompt, greedy = [5, 7, 9, 11], {"temperature": 0.0, "stop_token_ids": [3]}
    vllms = {"token_ids": prompt, "sampling_params": {**greedy, "max_tokens": 12, "logprobs": 1}}
    params = {**greedy, "max_new_tokens": 12}
    server = TestServer(TokenEndpoint(engine).app())
    async with TestClient(server, headers=authorization(secret)) as front, ClientSession(engine) as direct:
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        answer = await direct.post("/generate", json=body, headers=authorization(secret))
        expected = (await answer.json())["meta_info"]
        (choice,) = (await (await front.post("/inference/v1/generate", json=vllms)).json())["choices"]
        assert choice["token_ids"] == [token for _, token, *_ in expected["output_token_logprobs"]]
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert told == pytest.approx([logprob for logprob, *_ in expected["output_token_logprobs"]], abs=1e-6)
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert choice["finish_reason"] == expected["finish_reason"]["type"]
        assert (await (await front.get("/v1/models")).json())["data"]
        for wrong in ({"n": 2}, {"max_tokens": None}, {"stop": ["a"]}):
            refused = {**vllms, "sampling_params": vllms["sampling_params"] | wrong}
            assert (await front.post("/inference/v1/generate", json=refused)).status == 400
        without = {"Authorization": "Bearer wrong"}
        assert (await front.post("/inference/v1/generate", json=vllms, headers=without)).status == 401

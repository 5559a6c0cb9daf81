"""SGLang on the device that transformers and a trainer's weights are on: what it says, holds, and gives back."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.gpus import gpu
from tests.support.learned_checkpoint import make_learned_checkpoint
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rejections import rejected
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import TINY_DEEPSEEK, TINY_GLM4_MOE, TINY_QWEN3
from tests.support.whole_weights import WholeWeights, alone

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.phases import ENGINE_CACHE, ENGINE_WEIGHTS
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.weights import views_by_hub_name
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import check_all_alive, started_engines
from posttrain.rl.engines.reference_logprobs import Held, hold
from posttrain.rl.engines.secret import new_secret
from posttrain_weights.transport import Transport

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
# Where the GPU image has SGLang.
ON_GPUS = Path(os.environ.get("POSTTRAIN_GPU_ENGINE", "/opt/engine/bin/python"))
# Dimensions that kernels of GPUs are compiled for.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
HEADS = {**WIDE, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 8, "num_nextn_predict_layers": 0}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
ARCHITECTURES = {
    "qwen3": dataclasses.replace(TINY_QWEN3, **HEADS),
    "glm4_moe": dataclasses.replace(TINY_GLM4_MOE, **HEADS, **EXPERTS, rms_norm_eps=1e-5),
    "deepseek_v3": dataclasses.replace(TINY_DEEPSEEK, **WIDE, **EXPERTS, **LATENT, rms_norm_eps=1e-6),
}
RESPONSE_TOKENS, READY_SECONDS = 24, 300
CONVERSATIONS = ("abcabcabc", "x1x1x1", "hello", "7 8 9 7 8 9")
CASES = [
    pytest.param("qwen3", "cpu", marks=pytest.mark.faults("slow")),
    *(gpu(kind, "cuda") for kind in ARCHITECTURES),
]


@dataclass
class Served:
    """A trainer's weights on a device, and SGLang on the same one, empty at first."""

    folder: Path
    device: str
    weights: WholeWeights
    publisher: Any
    proof: Any
    client: EngineClient
    runner: asyncio.Runner
    url: str
    secret: str

    def held_against(self, canary: ReferenceLogprobs) -> Held:
        return self.runner.run(hold(self.url, self.secret, canary, "bf16", 60.0))


def configured(kind: str, device: str) -> Config:
    on_gpu = "hardware.gpus_per_node=1 engine.gpus_per_engine=1 engine.mem_fraction_static=0.3 "
    words = "engine.kind=sglang engine.num_engines=1 engine.max_running_requests=64"
    request = {"model": "tiny_qwen3", "site": "local", "hardware": "h100" if device == "cuda" else "cpu"}
    config = resolve({**request, "set": (on_gpu if device == "cuda" else "") + words}, CONFIG_DIR).config
    python = str(ON_GPUS if device == "cuda" else PYTHON)
    return dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, dtype="bfloat16", python=python, num_threads=1),
        model=dataclasses.replace(config.model, architecture=ARCHITECTURES[kind]),
        rollout=dataclasses.replace(config.rollout, fp8=False),
    )


@contextmanager
def served(folder: Path, kind: str, device: str) -> Iterator[Served]:
    from posttrain.rl.megatron_backend.served_values import ServedValues
    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.proof import WeightProof
    from posttrain.rl.weight_sync.publish import WeightPublisher
    from posttrain.rl.weight_sync.sharded import ShardedTransfer

    config, model = configured(kind, device), make_learned_checkpoint(folder / kind, ARCHITECTURES[kind])
    alone(folder)
    tensors = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    weights, (port,) = WholeWeights(tensors, ARCHITECTURES[kind], device), choose_free_ports(1)
    command = render_engine_command(config, 0, model, "127.0.0.1", port, without_weights=True)
    with started_engines({0: command}, folder, new_secret()) as engines, asyncio.Runner() as runner:
        client = EngineClient([command.url], engines[0].secret, 120)
        runner.run(client.__aenter__())
        try:
            runner.run(client.wait_ready(READY_SECONDS, lambda: check_all_alive(engines)))
            engine_shards = EngineShards(ServedValues(weights, None), client, runner)
            proof = WeightProof(engine_shards, engines[0].secret)
            publisher = WeightPublisher(config, engine_shards, folder / "none", model, proof)
            publisher._sharded = ShardedTransfer(config, engine_shards, round_bytes=1 << 20)  # several rounds
            made = (weights, publisher, proof, client, runner, command.url, engines[0].secret)
            yield Served(model, device, *made)
        finally:
            runner.run(client.__aexit__(None, None, None))


@torch.inference_mode()
def canary_of(run: Served) -> ReferenceLogprobs:
    """Return what transformers says with the weights, in FP32 on the same device: greedy text, and how likely it is."""
    model = load_model(run.folder, torch.float32).model.to(run.device).eval()
    for name, view in views_by_hub_name(model.state_dict()).items():
        if name in run.weights.values:
            view.copy_(run.weights.values[name])
    chat, prompts = ChatTokenizer(run.folder), []
    for content in CONVERSATIONS:
        messages = [{"role": "user", "content": content}]
        tokens = list(chat.render(messages, None))
        prompts.append(ReferencePrompt(messages, None, tokens, *greedy(model, tokens, run.device)))
    return ReferenceLogprobs("fp32", {}, prompts)


def greedy(model: torch.nn.Module, prompt: Sequence[int], device: str) -> tuple[list[int], list[float]]:
    tokens, logprobs = [*prompt], []
    for _ in range(RESPONSE_TOKENS):
        value, place = model(torch.tensor([tokens], device=device)).logits[0, -1].log_softmax(-1).max(-1)
        tokens.append(int(place))
        logprobs.append(min(0.0, float(value)))
    return tokens[len(prompt) :], logprobs


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "device"), CASES)
def test_an_engine_says_and_holds_what_the_trainer_has(tmp_path: Path, kind: str, device: str) -> None:
    if device == "cpu":
        require_sglang()
    elif not ON_GPUS.exists():
        pytest.skip(f"{ON_GPUS} does not exist: POSTTRAIN_GPU_ENGINE names the interpreter of SGLang's environment")
    with served(tmp_path, kind, device) as run:
        learned = canary_of(run)
        with pytest.raises(RuntimeError, match="engines hold other weights"):
            run.proof.check(0)
        with rejected("logprobs-differ", "dummy weights"):
            run.held_against(learned)
        run.publisher.publish(1)  # and every digest agrees
        assert run.publisher._sharded._channel.ways.way(0, 1) is Transport.SHARED
        print(kind, device, run.held_against(learned))
        run.weights.disturb(2)
        run.publisher.publish(2)
        with rejected("logprobs-differ"):
            run.held_against(learned)
        disturbed = canary_of(run)
        before = run.held_against(disturbed)
        spoil_a_bit(run)
        if device == "cuda":
            assert_memory_is_given_back(run)
            assert run.held_against(disturbed) == before


def spoil_a_bit(run: Served) -> None:
    """The trainer has another sign in one place than the engine, which the proof names."""
    name = next(name for name in run.weights.names if "o_proj" in name)
    spoiled = run.weights.values[name].view(-1)
    spoiled[-1] *= -1
    with pytest.raises(RuntimeError, match=re.escape(f"(engine 0: {name})")):
        run.proof.check(2)
    spoiled[-1] *= -1
    run.proof.check(2)


def assert_memory_is_given_back(run: Served) -> None:
    """An engine that sleeps has less of the GPU, and wakes up with what an update brings."""
    awake, _ = torch.cuda.mem_get_info()
    run.runner.run(run.client.release_memory([ENGINE_WEIGHTS, ENGINE_CACHE]))
    asleep, _ = torch.cuda.mem_get_info()
    assert asleep - awake > sum(value.nbytes for value in run.weights.values.values())
    run.runner.run(run.client.resume_memory([ENGINE_WEIGHTS]))
    with pytest.raises(RuntimeError, match="engines hold other weights"):
        run.proof.check(2)
    run.publisher.publish(3)
    run.runner.run(run.client.resume_memory([ENGINE_CACHE]))

"""A server is called right when it serves what was exported, and what is wrong with it is told: real engines, asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.rejections import rejected
from tests.support.served_in_foreground import environment, serve, serving
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import write_shards
from tests.unit.rl.engines import conftest as engines
from tests.unit.rl.engines.embedded.test_generation import reference, topk_by_sorting_places
from tests.unit.rl.engines.embedded.test_server import engine
from transformers import PreTrainedTokenizerBase

from posttrain.checkpoint.quantization.fp8 import quantize_named
from posttrain.checkpoint.reference_logprobs import (
    CANARY_NAME,
    ReferenceLogprobs,
    ReferencePrompt,
    read_reference_logprobs,
    write_reference_logprobs,
)
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.cluster.processes import end_processes, start_child
from posttrain.errors import ConfigError
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.reference_logprobs import BOUNDS, ROUNDED, Held, compare, hold, problems_of
from posttrain.rl.engines.teacher_forcing import ForcedTokens

SECRET = "of the attempt"
NUM_TOKENS = 12
QUESTIONS = ("3141", "2718", "1618", "1414")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Weights of a dense model, half as strong as other tests': chance has no margins that roundings could spare."""
    strong = engines.strong_tensors("qwen3", seed=0)
    return {
        name: (tensor.float() / 2).to(tensor.dtype) if tensor.dim() == 2 else tensor for name, tensor in strong.items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return engines.write_checkpoint(tmp_path_factory.mktemp("bf16") / "hf", "qwen3", tensors)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A checkpoint with a canary, of transformers' model in FP32 in the place of the trainer."""
    made = tmp_path_factory.mktemp("served") / "hf"
    shutil.copytree(checkpoint, made)
    tokenizer.save_pretrained(made)
    model, prompts = reference(made), []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", topk_by_sorting_places)
        for question in QUESTIONS:
            messages = [{"role": "system", "content": "sort the digits."}, {"role": "user", "content": question}]
            asked = ChatTokenizer(made).render(messages)
            answer: list[int] = []
            for _ in range(NUM_TOKENS):
                logprobs = model(torch.tensor([[*asked, *answer]])).logits[0].log_softmax(-1)
                answer.append(int(logprobs[-1].argmax()))
            # The last token was not read: what is before it predicts all of the answer.
            values = logprobs[len(asked) - 1 :].gather(1, torch.tensor(answer)[:, None])[:, 0]
            prompts.append(ReferencePrompt(messages, None, asked, answer, values.tolist()))
    write_reference_logprobs(made, ReferenceLogprobs("fp32", {}, prompts))
    return made


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The same weights in FP8 blocks, with the same canary."""
    made = tmp_path_factory.mktemp("served_fp8") / "hf"
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_shards(made, dict(pair for name, tensor in tensors.items() for pair in quantize_named(name, tensor)), 3)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (made / "config.json").write_text(json.dumps(config))
    return made


def held(served: Path, canary_of: Path, precision: str = "bf16") -> Held:
    canary = read_reference_logprobs(canary_of)
    assert canary

    async def story() -> Held:
        async with engine(served) as (server, _):
            return await hold(str(server.make_url("/")), SECRET, canary, precision)

    return asyncio.run(story())


def refusal(served: Path, canary_of: Path, precision: str = "bf16") -> str:
    with pytest.raises(ConfigError) as refused:
        held(served, canary_of, precision)
    return str(refused.value)


def test_the_exported_weights_are_right(folder: Path) -> None:
    found = held(folder, folder)
    assert found.num_tokens == len(QUESTIONS) * NUM_TOKENS
    assert found.difference < 1e-4
    assert found.chat == ""
    assert found.precision == ROUNDED, "the trainer had FP32"


def test_quantised_ones_are_within_their_bound(fp8: Path) -> None:
    assert 1e-4 < held(fp8, fp8, "fp8").difference <= BOUNDS["fp8"]


def test_codes_without_their_scales_are_refused(fp8: Path, tmp_path: Path) -> None:
    served = tmp_path / "hf"
    shutil.copytree(fp8, served)
    for path in served.glob("*.safetensors"):
        held_there = load_file(path)
        ones = {name: torch.ones_like(t) if name.endswith("_scale_inv") else t for name, t in held_there.items()}
        save_file(ones, path, metadata={"format": "pt"})
    assert "quantised weights without their scales" in refusal(served, fp8, "fp8")


def test_dummy_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    dummy = engines.write_checkpoint(tmp_path / "hf", "qwen3", engines.strong_tensors("qwen3", seed=5))
    for path in folder.iterdir():
        if not (dummy / path.name).exists():
            shutil.copy(path, dummy)
    told = refusal(dummy, folder)
    assert "dummy weights" in told
    assert "chat" not in told, "its template is right"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("<|user|>", "<|user|>\n", "tokens of prompt 1, which had"),
        ("<|user|>", "<|assistant|>", "what follows its chat endpoint's prompts is"),
    ],
)
def test_another_template_is_refused(folder: Path, tmp_path: Path, old: str, new: str, told: str) -> None:
    served = tmp_path / "hf"
    shutil.copytree(folder, served)
    template = served / "chat_template.jinja"
    assert old in template.read_text()
    template.write_text(template.read_text().replace(old, new))
    words = refusal(served, folder)
    assert told in words
    assert "nats from the trainer's" not in words, "its weights are right"


def test_a_server_without_the_secret_is_told(folder: Path) -> None:
    canary = read_reference_logprobs(folder)
    assert canary

    async def story() -> None:
        async with engine(folder) as (server, _):
            await hold(str(server.make_url("/")), "another", canary, "bf16", 10)

    with pytest.raises(EngineError, match="another secret"):
        asyncio.run(story())


def test_both_interfaces_tell_the_same(folder: Path) -> None:
    canary = read_reference_logprobs(folder)
    assert canary
    prompt = canary.prompts[0]

    async def story() -> list[list[float | None]]:
        async with engine(folder) as (server, _), ForcedTokens(str(server.make_url("/")), SECRET, 30) as asked:
            assert await asked.interface() == "sglang"
            pair = (prompt.prompt_tokens, prompt.response_tokens)
            return [(await asked.logprobs([pair], interface))[0] for interface in ("openai", "sglang")]

    openai, sglang = asyncio.run(story())
    assert openai == sglang == pytest.approx(prompt.logprobs, abs=1e-4)


def canary_of(*logprobs: float) -> ReferenceLogprobs:
    return ReferenceLogprobs("bf16", {}, [ReferencePrompt([], None, [1], [2] * len(logprobs), logprobs)])


def test_the_mean_over_all_tokens_counts() -> None:
    found = compare(canary_of(-1.0, -2.0), [[-1.0, -5.0]], "bf16")
    assert found == Held(2, 1.5, 3.0, -3.0, -1.5, "bf16")


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("share", "count"), [(1.0, 0), (1.01, 1)])
def test_at_the_bound_nothing_is_said(precision: str, share: float, count: int) -> None:
    found = Held(4, BOUNDS[precision] * share, 9.0, -1.0, -1.0, precision)
    assert len(problems_of("http://there", found)) == count


def test_what_is_no_number_is_refused() -> None:
    for value in (None, math.nan, -math.inf):
        (problem,) = problems_of("http://there", compare(canary_of(-1.0, -2.0), [[-1.0, value]], "bf16"))
        assert "scales that were not loaded" in problem.remedy


def test_causes_go_with_the_distance() -> None:
    (near,) = problems_of("x", Held(4, 0.3, 9.0, -1.0, -1.0, "bf16"))
    (far,) = problems_of("x", Held(4, 0.6, 9.0, -1.0, -1.0, "bf16"))
    assert "an older checkpoint" in near.remedy
    assert "dummy" in far.remedy


def test_what_is_read_is_looked_at(tmp_path: Path) -> None:
    assert read_reference_logprobs(tmp_path) is None
    write_reference_logprobs(tmp_path, canary_of(-1.0))
    assert read_reference_logprobs(tmp_path) == canary_of_json(canary_of(-1.0))
    good = json.loads((tmp_path / CANARY_NAME).read_text())
    spoiled = [
        "{",
        "[]",
        json.dumps({**good, "prompts": []}),
        json.dumps({**good, "prompts": [{**good["prompts"][0], "logprobs": [0.5]}]}),
        json.dumps({**good, "prompts": [{**good["prompts"][0], "logprobs": [-1.0, -2.0]}]}),
        json.dumps({**good, "prompts": [{**good["prompts"][0], "response_tokens": ["a"]}]}),
        json.dumps({**good, "prompts": [{**good["prompts"][0], "prompt_tokens": []}]}),
        json.dumps({**good, "prompts": [{**good["prompts"][0], "more": 1}]}),
    ]
    for content in spoiled:
        (tmp_path / CANARY_NAME).write_text(content)
        with rejected("reference-logprobs-invalid", CANARY_NAME):
            read_reference_logprobs(tmp_path)


def canary_of_json(canary: ReferenceLogprobs) -> ReferenceLogprobs:
    """Return what JSON makes of its tuples."""
    return ReferenceLogprobs.from_dict(json.loads(json.dumps(dataclasses.asdict(canary))))


@pytest.mark.sglang
@pytest.mark.faults("slow")
def test_sglang_is_asked_in_its_own_words(folder: Path, tmp_path: Path) -> None:
    """Right weights are let in, and what it calls dummy ones are refused."""
    require_sglang()
    (port,) = choose_free_ports(1)
    words = (folder, "--engine", "sglang", "--hardware", "cpu", "--python", PYTHON, "--port", port)
    with serving(tmp_path, *words):
        shutil.copy(tmp_path / "server.log", tmp_path / "right.log")
    assert "renders prompts as the trainer did" in (tmp_path / "right.log").read_text()
    shown = serve(tmp_path, *words, "--print").replace("--model-path", "--load-format dummy --model-path")
    with (tmp_path / "dummy.log").open("wb") as output:
        dummy = start_child(["bash", "-c", shown], env=environment(), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while "is not ready" in (said := serve(tmp_path, folder, "--check", f"127.0.0.1:{port}", code=1)):
            assert time.monotonic() < deadline, (tmp_path / "dummy.log").read_text()[-2000:]
    finally:
        end_processes([dummy])
    assert "dummy weights" in said
    assert "chat" not in said

"""What engines say of responses that are given to them: the embedded one and SGLang, against a plain forward pass."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.rejections import rejected
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.engine_endpoints import client_of, engines_to_ask
from posttrain.rl.engines.responses import GenerateResult
from posttrain.rl.rollout.episode import Episode
from posttrain_serving.precision.divergence import CheckpointLogprobs, Likeliest, Sample, truncated_divergence
from posttrain_serving.precision.precisions import (
    NUM_LIKELIEST,
    EngineLogprobs,
    likeliest_in,
    read_said,
    samples_of,
    tokens_of,
    write_said,
)

SAMPLES = [Sample((5, 9, 33, 12, 60, 2, 8, 40), 4), Sample((7, 7, 1), 1)]


def said_by(folder: Path, logs: Path, words: str) -> Likeliest:
    config = resolve({"model": "tiny", "site": "local", "set": f"engine.num_threads=1 {words}"}, ROOT / "config").config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=TINY_QWEN3))

    async def story() -> Likeliest:
        with engines_to_ask(config, folder, logs) as engines:
            async with client_of(config, engines):
                return await likeliest_in(engines, SAMPLES, 120)

    return asyncio.run(story())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(made, TINY_QWEN3)
    make_tokenizer(TINY_QWEN3.max_position_embeddings).save_pretrained(made)
    return made


def check(folder: Path, found: Likeliest, nats: float) -> None:
    expected = CheckpointLogprobs(folder, SAMPLES).logprobs(slice(None))
    assert found.tokens.shape == (4 + 2, NUM_LIKELIEST)
    at_tokens = expected.gather(1, found.tokens.long())
    torch.testing.assert_close(found.logprobs, at_tokens, atol=nats, rtol=0)
    torch.testing.assert_close(found.logprobs, expected.topk(NUM_LIKELIEST).values, atol=nats, rtol=0)


# Over ten seconds: two engines import torch and transformers.
def test_two_embedded_engines_tell_what_a_forward_pass_gives(folder: Path, tmp_path: Path) -> None:
    check(folder, said_by(folder, tmp_path, "engine.num_engines=2"), 1e-4)


@pytest.mark.sglang
@pytest.mark.faults("engines")
def test_sglang_tells_the_same(folder: Path, tmp_path: Path) -> None:
    require_sglang()
    words = f"engine.kind=sglang engine.python={PYTHON} engine.dtype=float32 engine.num_engines=1"
    words += " engine.start_timeout_seconds=600"
    found = said_by(folder, tmp_path, words)
    check(folder, found, 1e-2)
    embedded = said_by(folder, tmp_path / "embedded", "engine.num_engines=1")
    assert truncated_divergence(embedded, found).mean < 1e-4


def test_the_first_response_to_each_of_the_first_prompts_is_read() -> None:
    config = resolve({"model": "tiny", "site": "local"}, ROOT / "config").config
    asked = dataclasses.replace(config.evaluation, num_samples_per_prompt=2)
    asked = dataclasses.replace(asked, deployment=dataclasses.replace(asked.deployment, num_samples=3))
    room = config.model.architecture.max_position_embeddings
    prompts = [[7] * (room - 2 if number == 4 else 2) for number in range(10)]
    results = [GenerateResult((number, 1), (0.0, 0.0), "stop", None) for number in range(10)]
    episodes = [Episode.of_response(prompt, result) for prompt, result in zip(prompts, results, strict=True)]
    found = samples_of(dataclasses.replace(config, evaluation=asked), (episodes, 1.0))
    assert found[:2] == [Sample((7, 7, 0, 1), 2), Sample((7, 7, 2, 1), 2)]
    assert len(found) == 3
    assert len(found[2].tokens) == room - 1, "a server wants room for one token more"


def test_what_was_said_is_read_as_it_was_written(tmp_path: Path) -> None:
    likeliest = Likeliest(torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([[-0.1, -3.0]]))
    said = EngineLogprobs("fp8", "sglang", 2, 80.0, 1.5, {"heldout": [(0, True), (0, False)]}, SAMPLES, likeliest)
    write_said(said, tmp_path / "fp8.json", "digest")
    found, digest = read_said(tmp_path / "fp8.json")
    assert digest == "digest"
    assert dataclasses.replace(found, likeliest=likeliest) == said
    assert found.likeliest.tokens.tolist() == [[3, 1]]
    assert found.likeliest.logprobs.tolist() == likeliest.logprobs.tolist()


def truncate(path: Path) -> None:
    """Leave half of the tensors."""
    tensors = tokens_of(path)
    tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{}"), truncate])
def test_what_is_damaged_is_named(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    likeliest = Likeliest(torch.tensor([[3]], dtype=torch.int32), torch.tensor([[-0.1]]))
    write_said(EngineLogprobs("fp8", "sglang", 1, 1.0, 1.0, {}, SAMPLES, likeliest), tmp_path / "fp8.json", "digest")
    spoil(tmp_path / "fp8.json")
    with rejected("answers-invalid", "fp8.json"):
        read_said(tmp_path / "fp8.json")

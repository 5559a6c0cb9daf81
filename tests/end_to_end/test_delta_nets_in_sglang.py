"""Qwen3.5 in a real SGLang that started without weights: what the trainer publishes says what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.end_to_end.test_weights_in_sglang import ARCHITECTURES, served
from tests.support.sglang_environment import require_sglang

from posttrain.rl.engines.responses import GenerateRequest, GenerateResult

LENGTHS, NUM_TOKENS, TOLERANCE = (3, 40, 70), 24, 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5", marks=pytest.mark.faults("slow")), "qwen3_5_moe"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts shorter than the convolution's window and longer than a chunk of the delta rule, in one batch."""
    require_sglang()
    from transformers import AutoModelForCausalLM

    arch = ARCHITECTURES[kind]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, arch.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    requests = [GenerateRequest(prompt, 7, NUM_TOKENS, temperature=0.0, ignore_eos=True) for prompt in prompts]
    with served(tmp_path, kind, 1, monkeypatch) as run:
        run.publisher.publish(1)
        answers = run.runner.run(run.client.generate(requests, 0))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_same(model, prompt, answer)


@torch.inference_mode()
def assert_same(model: torch.nn.Module, prompt: list[int], answer: GenerateResult) -> None:
    tokens = [*prompt, *answer.output_ids]
    rows = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
    apart = (torch.tensor(answer.logprobs) - expected).abs().max()
    assert apart < TOLERANCE
    assert (rows.max(-1).values - expected).max() < TOLERANCE, "a greedy token is the likeliest one"

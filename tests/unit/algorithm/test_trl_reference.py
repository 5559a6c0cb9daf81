"""Loss and gradients of a whole update against TRL's GRPOTrainer, an independent implementation.

TRL's own `_compute_loss` runs on a real two-layer model, log-probabilities included. Ours gets the same tokens packed,
one micro-batch per sample. Compared are the loss and the gradient of every weight.
"""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithm.aggregation import token_weights
from posttrain.algorithm.logprobs import chunked_logprobs
from posttrain.algorithm.policy_loss import clipped_policy_loss
from posttrain.batching.packed_batch import build_packed_batch
from posttrain.types import Sample

LOW, HIGH, TEMPERATURE, LONGEST = 0.2, 0.28, 0.8, 6
PROMPT_LENGTH, RESPONSE_LENGTHS = 3, (1, 3, 6, 4)
TRL_LOSS = {"sample_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).train()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 64, (count,), generator=generator).tolist())

    return [
        Sample(i, 0, draw(PROMPT_LENGTH), draw(length), (-1.0,) * length, "stop", 0, 0.0)
        for i, length in enumerate(RESPONSE_LENGTHS)
    ]


ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -1.1])


@pytest.fixture(scope="module")
def old_logprobs(model, samples) -> list[torch.Tensor]:
    """Log-probabilities of the policy before the update: the present ones, moved so that some tokens are clipped."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        return [
            _logprobs(model, sample) + 0.4 * torch.randn(len(sample.response_tokens), generator=generator)
            for sample in samples
        ]


def _logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    batch = build_packed_batch([sample], [0])
    hidden = model.model(input_ids=batch.tokens[None], position_ids=batch.position_ids[None]).last_hidden_state[0]
    logprobs = chunked_logprobs(hidden, model.lm_head.weight, batch.targets, TEMPERATURE, chunk_size=4)
    return batch.response_values(logprobs)[0]


def _ours(model, samples, old_logprobs, aggregation: str) -> tuple[float, dict[str, torch.Tensor], float]:
    model.zero_grad()
    weights = token_weights(RESPONSE_LENGTHS, aggregation, LONGEST)
    total, clipped_tokens = 0.0, 0
    for i, sample in enumerate(samples):
        logprobs = _logprobs(model, sample)
        advantages = ADVANTAGES[i].expand(len(logprobs))
        losses, clipped = clipped_policy_loss(logprobs, old_logprobs[i], advantages, LOW, HIGH)
        loss = (weights[i] * losses).sum()
        loss.backward()
        total += loss.item()
        clipped_tokens += int(clipped.sum())
    return total, _gradients(model), clipped_tokens / sum(RESPONSE_LENGTHS)


def _trl(model, samples, old_logprobs, aggregation: str, folder) -> tuple[float, dict[str, torch.Tensor], float]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from posttrain.checkpoint.tiny_tokenizer import make_tokenizer

    config = GRPOConfig(
        output_dir=str(folder),
        loss_type=TRL_LOSS[aggregation],
        epsilon=LOW,
        epsilon_high=HIGH,
        beta=0.0,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        num_generations=len(samples),
        per_device_train_batch_size=len(samples),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=make_tokenizer(64),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    model.zero_grad()
    loss = trainer._compute_loss(model, _trl_inputs(samples, old_logprobs))
    loss.backward()
    return loss.item(), _gradients(model), trainer._metrics["train"]["clip_ratio/region_mean"][0]


def _trl_inputs(samples: list[Sample], old_logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    def pad(rows: list) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)

    mask = pad([torch.ones(len(sample.response_tokens), dtype=torch.long) for sample in samples])
    prompts = torch.tensor([sample.prompt_tokens for sample in samples])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": pad([sample.response_tokens for sample in samples]),
        "completion_mask": mask,
        "advantages": ADVANTAGES,
        "old_per_token_logps": pad(old_logprobs),
        "num_items_in_batch": mask.sum(),
    }


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("aggregation", list(TRL_LOSS))
def test_loss_gradients_and_clip_fraction_equal_trl(model, samples, old_logprobs, aggregation, tmp_path):
    theirs = _trl(model, samples, old_logprobs, aggregation, tmp_path)
    ours = _ours(model, samples, old_logprobs, aggregation)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert 0 < ours[2] < 1
    assert ours[2] == pytest.approx(theirs[2], rel=1e-6)
    for name, gradient in theirs[1].items():
        assert torch.allclose(ours[1][name], gradient, rtol=1e-4, atol=1e-6), name

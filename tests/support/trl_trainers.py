"""TRL's trainers on a two-layer model, and the same model's log-probabilities of our packed rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posttrain.rl.algorithm.logprobs import chunked_logprobs
from posttrain.rl.batching.packed_batch import PackedBatch

TEMPERATURE, LONGEST = 0.8, 6
# Gradients far below eps are rounding, which Adam would make as large as any other.
ADAMW = {"lr": 5e-3, "eps": 1e-3}


def make_llama() -> torch.nn.Module:
    """Return a random model whose log-probabilities are far from uniform."""
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


def logprobs_of(model: torch.nn.Module, batch: PackedBatch, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Return the log-probability of every target of a row; its sequences do not see each other."""
    rows = zip(batch.tokens.split(batch.lengths), batch.position_ids.split(batch.lengths), strict=True)
    hidden = [model.model(input_ids=t[None], position_ids=p[None]).last_hidden_state[0] for t, p in rows]
    return chunked_logprobs(torch.cat(hidden), model.lm_head.weight, batch.targets, temperature, chunk_size=4)[0]


def make_trainer(
    model: torch.nn.Module, folder: Path, trainer: str = "GRPO", corrects: bool = False, **arguments: Any
) -> Any:
    """Return a trainer of TRL for the model.

    Args:
        model: Trained in place.
        folder: TRL's output.
        trainer: "GRPO" or "RLOO".
        corrects: TRL gets the engine's log-probabilities.
        arguments: Of TRL's configuration.
    """
    import trl
    from datasets import Dataset

    from posttrain.checkpoint.tiny.tokenizer import make_tokenizer

    config: Callable[..., Any] = getattr(trl, f"{trainer}Config")
    made = getattr(trl, f"{trainer}Trainer")(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            output_dir=str(folder),
            beta=0.0,
            temperature=TEMPERATURE,
            max_completion_length=LONGEST,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=make_tokenizer(64),
    )
    made.current_gradient_accumulation_steps = 1
    # With it set beforehand, TRL would look for a server.
    made.use_vllm = corrects
    model.train()
    return made


# Of FP32 over the updates of a test; by the kernels of the CPU, up to 1.1e-5 (AMD EPYC, one thread).
ROUNDING = 2e-5


def assert_equal_moves(start: torch.nn.Module, ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Every parameter has moved, and by the same in both models."""
    before, expected = dict(start.named_parameters()), dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        move = expected[key] - before[key]
        assert move.norm() > 0.01 * before[key].norm(), key
        assert (parameter - expected[key]).norm() <= ROUNDING * move.norm(), key

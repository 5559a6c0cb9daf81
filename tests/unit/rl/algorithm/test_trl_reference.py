"""Five rollouts with two updates each, against TRL's trainers: an independent implementation of whole steps.

TRL's own code makes rewards to advantages, compares with the engine's log-probabilities and computes the loss, on a
real two-layer model that AdamW moves; only its generation is replaced, by responses that both sides get. Ours sees them
packed, in two micro-batches. The second update of a rollout has ratios that clips decide.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.algorithms import objective, settings
from tests.support.trl_trainers import (
    ADAMW,
    LONGEST,
    TEMPERATURE,
    assert_equal_moves,
    logprobs_of,
    make_llama,
    make_trainer,
)

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.algorithm.objective import Needs, Objective, TokenBatch
from posttrain.rl.batching.packed_batch import PackedBatch, build_packed_batch
from posttrain.rl.training.batch import counted_tokens
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

NUM_ROLLOUTS, UPDATES_PER_ROLLOUT = 5, 2
PROMPT_LENGTH, RESPONSE_LENGTHS, GROUP = 3, (1, 3, 6, 4, 2, 5, 5, 6), 4
MICRO_BATCHES = ((0, 2, 3, 5), (1, 4, 6, 7))


@dataclass(frozen=True)
class Case:
    """One algorithm in both implementations.

    Args:
        preset: Line of `config/algorithms.yaml`.
        ours: Keys of the section `algorithm` that differ from it.
        theirs: Arguments of TRL's configuration.
        trainer: "GRPO" or "RLOO".
        corrects: TRL corrects for the engine, too.
        reward_scale: TRL adds 1e-4 to a standard deviation, we 1e-6: beside large rewards neither counts.
        micro_batches: Samples of ours.
        truncated: Samples that are cut at the token limit, and left out of the loss.
    """

    preset: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    trainer: str = "GRPO"
    corrects: bool = False
    reward_scale: float = 1e4
    micro_batches: tuple[tuple[int, ...], ...] = MICRO_BATCHES
    truncated: tuple[int, ...] = ()


BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
EPSILONS = {"epsilon": 0.2, "epsilon_high": 0.28}
MASKED, THEIR_MASKED = {"mask_truncated": True}, {"mask_truncated_completions": True}
IS = {"loss_type": "grpo", "vllm_importance_sampling_clip_max": 1.2, **EPSILONS}
CASES = {
    "grpo": Case("grpo", BOUNDS, {"loss_type": "grpo", **EPSILONS}),
    "dr_grpo": Case("dr_grpo", BOUNDS, {"loss_type": "dr_grpo", "scale_rewards": "none", **EPSILONS}, reward_scale=1.0),
    "dapo": Case("dapo", BOUNDS, {"loss_type": "dapo", **EPSILONS}),
    "gspo": Case(
        "gspo",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "bnpo": Case("bnpo", BOUNDS, {"loss_type": "bnpo", **EPSILONS}, micro_batches=(tuple(range(8)),)),
    "cispo": Case("cispo", {"clip_ratio_high": 0.28}, {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 1.28}),
    "rloo": Case("rloo", BOUNDS, EPSILONS, trainer="RLOO", reward_scale=1.0),
    "grpo, truncated left out": Case(
        "grpo", MASKED | BOUNDS, {"loss_type": "grpo", **THEIR_MASKED, **EPSILONS}, truncated=(1, 2, 7)
    ),
    "dapo, truncated left out": Case(
        "dapo", MASKED | BOUNDS, {"loss_type": "dapo", **THEIR_MASKED, **EPSILONS}, truncated=(1, 2, 7)
    ),
    "dual_clip": Case("dual_clip", BOUNDS | {"clip_ratio_dual": 1.4}, {"loss_type": "grpo", "delta": 1.4, **EPSILONS}),
    "tis": Case(
        "tis",
        BOUNDS | {"correction_high": 1.2},
        IS | {"vllm_importance_sampling_mode": "token_truncate"},
        corrects=True,
    ),
    "tis of sequences": Case(
        "tis",
        BOUNDS | {"correction_high": 1.2, "correction_level": "sequence"},
        IS | {"vllm_importance_sampling_mode": "sequence_truncate"},
        corrects=True,
    ),
    "mis of tokens": Case(
        "mis",
        BOUNDS | {"correction_level": "token", "correction_low": 0.7, "correction_high": 1.2},
        IS | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.7},
        corrects=True,
    ),
    "mis": Case(
        "mis", BOUNDS | {"correction_high": 1.2}, IS | {"vllm_importance_sampling_mode": "sequence_mask"}, corrects=True
    ),
}


@pytest.fixture(scope="module")
def start() -> torch.nn.Module:
    return make_llama()


@dataclass(frozen=True)
class Rollout:
    """Prompts (one per group), responses, rewards, and what the engine said of its tokens."""

    prompts: list[tuple[int, ...]]
    responses: list[tuple[int, ...]]
    rewards: list[float]
    engine_noise: list[torch.Tensor]


def rollout_of(case: Case, number: int) -> Rollout:
    """Return a rollout; where truncated responses are left out, all others end with the end token, as TRL wants it."""
    rollout = make_rollout(number, case.reward_scale)
    if not case.truncated:
        return rollout
    end = make_tokenizer(64).eos_token_id
    ended = [response if i in case.truncated else (*response[:-1], end) for i, response in enumerate(rollout.responses)]
    return replace(rollout, responses=ended)


def make_rollout(number: int, scale: float) -> Rollout:
    generator = torch.Generator().manual_seed(100 + number)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 64, (count,), generator=generator).tolist())

    prompts = [draw(PROMPT_LENGTH) for _ in range(len(RESPONSE_LENGTHS) // GROUP)]
    rewards = (scale * torch.rand(len(RESPONSE_LENGTHS), generator=generator)).tolist()
    noise = [0.4 * torch.randn(length, generator=generator) for length in RESPONSE_LENGTHS]
    return Rollout(prompts, [draw(length) for length in RESPONSE_LENGTHS], rewards, noise)


# ---- ours ----


def train_ours(model: torch.nn.Module, case: Case, objective: Objective) -> list[float]:
    """Train the model in place; returns the share of clipped tokens of each update."""
    algorithm = settings(case.preset, **case.ours)
    optimizer, clipped = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for number in range(NUM_ROLLOUTS):
        rollout = rollout_of(case, number)
        samples = [
            Trajectory.of_response(
                rollout.prompts[i // GROUP],
                response,
                (-1.0,) * len(response),
                0,
                prompt_id=i // GROUP,
                sample_index=i % GROUP,
                reward=r,
                finish_reason="length" if i in case.truncated else "stop",
            )
            for i, (response, r) in enumerate(zip(rollout.responses, rollout.rewards, strict=True))
        ]
        groups = [TrajectoryGroup(Prompt(i, (), ""), tuple(samples[i * GROUP :][:GROUP])) for i in range(2)]
        advantages = objective.advantages(groups)
        weights = objective.token_weights([counted_tokens(algorithm, s) for s in samples], case.micro_batches)
        rows = [build_packed_batch(samples, indices, multiple_of=8) for indices in case.micro_batches]
        batches = [make_batch(model, row, advantages, weights, rollout.engine_noise) for row in rows]
        for _ in range(UPDATES_PER_ROLLOUT):
            optimizer.zero_grad()
            share = 0.0
            for row, batch in zip(rows, batches, strict=True):
                losses, statistics = objective.token_losses(logprobs_of(model, row), batch)
                (losses * batch.weights).sum().backward()
                share += float(statistics["clip_fraction"][batch.is_response].sum()) / sum(RESPONSE_LENGTHS)
            optimizer.step()
            clipped.append(share)
    return clipped


def make_batch(model, row: PackedBatch, advantages, weights, noise: Sequence[torch.Tensor]) -> TokenBatch:
    is_response = row.loss_mask > 0
    with torch.no_grad():
        old = logprobs_of(model, row)
    engine = old.clone()
    engine[is_response] += torch.cat([noise[index] for index in row.trajectory_indices])
    spread = (row.spread(advantages), row.spread(weights))
    return TokenBatch(row.lengths, is_response, *spread, old_logprobs=old, engine_logprobs=engine)


# ---- theirs ----


def train_theirs(model: torch.nn.Module, case: Case, folder: Path) -> None:
    trainer = make_trainer(
        model,
        folder,
        case.trainer,
        case.corrects,
        num_generations=GROUP,
        num_iterations=UPDATES_PER_ROLLOUT,
        per_device_train_batch_size=len(RESPONSE_LENGTHS),
        **case.theirs,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for number in range(NUM_ROLLOUTS):
        rollout = rollout_of(case, number)
        trainer._generate = partial(generated, model, trainer, case, rollout)
        trainer.reward_funcs = [lambda completions, rewards=rollout.rewards, **_: rewards]
        trainer._current_train_step_time = 0.0
        prompts = [{"prompt": str(i)} for i in range(len(rollout.prompts)) for _ in range(GROUP)]
        inputs = trainer._generate_and_score_completions(prompts)
        for _ in range(UPDATES_PER_ROLLOUT):
            optimizer.zero_grad()
            trainer._compute_loss(model, inputs).backward()
            optimizer.step()


def generated(model, trainer, case: Case, rollout: Rollout, prompts: list) -> tuple:
    """Return what TRL's generation would: these responses, with the engine's log-probabilities."""
    prompt_ids = [list(prompt) for prompt in rollout.prompts for _ in range(GROUP)]
    responses = [list(response) for response in rollout.responses]
    if case.trainer == "RLOO":
        return prompt_ids, responses, [""] * len(responses)
    said = None
    if case.corrects:
        said = []
        for prompt, response, noise in zip(prompt_ids, responses, rollout.engine_noise, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            rows = torch.log_softmax(logits, -1)[range(len(response)), response]
            said.append((rows + noise).tolist())
    return prompt_ids, responses, None, [""] * len(responses), said, {}, None, []


@pytest.mark.parametrize("name", list(CASES))
def test_every_parameter_moves_as_in_trl(start, name: str, tmp_path) -> None:
    case = CASES[name]
    theirs, ours = copy.deepcopy(start), copy.deepcopy(start)
    train_theirs(theirs, case, tmp_path)
    clipped = train_ours(ours, case, objective(case.preset, LONGEST, **case.ours))
    assert max(clipped) > 0.05, "nothing is shown where nothing is clipped"
    assert_equal_moves(start, ours, theirs)


def test_fine_tuning_moves_every_parameter_as_in_trl(start, tmp_path) -> None:
    """TRL's whole loop; one batch holds all samples."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from posttrain.rl.algorithm.sft import SupervisedFineTuning

    rollout, num_steps = make_rollout(0, scale=1.0), 5
    prompts = [rollout.prompts[i // GROUP] for i in range(len(rollout.responses))]
    pairs = list(zip(prompts, rollout.responses, strict=True))
    rows = [
        {"input_ids": [*prompt, *response], "completion_mask": [0] * len(prompt) + [1] * len(response)}
        for prompt, response in pairs
    ]
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        completion_only_loss=True,
        max_steps=num_steps,
        per_device_train_batch_size=len(rows),
        learning_rate=ADAMW["lr"],
        adam_epsilon=ADAMW["eps"],
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    theirs, ours = copy.deepcopy(start), copy.deepcopy(start)
    SFTTrainer(
        theirs, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer(64)
    ).train()

    objective = SupervisedFineTuning("token_mean", LONGEST)
    assert objective.needs == Needs()
    samples = [
        Trajectory.of_response(prompt, response, prompt_id=i, reward=0.0) for i, (prompt, response) in enumerate(pairs)
    ]
    advantages = objective.advantages([TrajectoryGroup(Prompt(s.prompt_id, (), ""), (s,)) for s in samples])
    weights = objective.token_weights(RESPONSE_LENGTHS, MICRO_BATCHES)
    optimizer = torch.optim.AdamW(ours.parameters(), weight_decay=0.0, **ADAMW)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for indices in MICRO_BATCHES:
            row = build_packed_batch(samples, indices, multiple_of=8)
            batch = TokenBatch(row.lengths, row.loss_mask > 0, row.spread(advantages), row.spread(weights))
            # The model is trained at its own temperature.
            losses, _ = objective.token_losses(logprobs_of(ours, row, temperature=1.0), batch)
            (losses * batch.weights).sum().backward()
        optimizer.step()
    assert_equal_moves(start, ours, theirs)

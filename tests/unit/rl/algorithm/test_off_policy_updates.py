"""Five steps of two updates on stale trajectories, against TRL's loss and, where TRL has none, against NumPy.

The tokens of a response have been sampled by weights of two versions, one and two steps old. Both sides get the
recorded log-probabilities and compare their losses and weights after every update. Ours sees the trajectories as a
training step does: cut into updates, packed in micro-batches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.algorithms import CONFIG_DIR, settings
from tests.support.trl_trainers import (
    ADAMW,
    LONGEST,
    TEMPERATURE,
    assert_equal_moves,
    logprobs_of,
    make_llama,
    make_trainer,
)

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.algorithm.objective import Objective
from posttrain.rl.algorithm.policy_gradient import PolicyGradient
from posttrain.rl.training.batch import make_updates
from posttrain.rl.training.staleness import staleness_metrics
from posttrain.types import Prompt, Trajectory, TrajectoryGroup, VersionSpan

NUM_STEPS, STALENESS, UPDATES, GROUP, GROUPS_PER_UPDATE, PROMPT_LENGTH = 5, 2, 2, 4, 2, 3
TOLERANCE = 1e-5
# Beside such rewards, what is added to their standard deviation does not count: TRL adds 1e-4, we 1e-6.
REWARD_SCALE = 1e4

Model = torch.nn.Module
# Takes a step on these groups; yields the loss of each update, after the update.
Trainer = Callable[[Sequence[TrajectoryGroup]], Iterator[float]]


@pytest.fixture(scope="module")
def start() -> Model:
    return make_llama()


@pytest.fixture(scope="module")
def config() -> Config:
    """Two optimizer updates in a step, and more than one micro-batch in each."""
    made = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    return dataclasses.replace(
        made,
        rollout=dataclasses.replace(made.rollout, num_samples_per_prompt=GROUP, max_response_tokens=LONGEST),
        training=dataclasses.replace(made.training, global_batch_size=GROUPS_PER_UPDATE * GROUP),
        trainer=dataclasses.replace(made.trainer, max_tokens_per_gpu=24),
    )


def sample_groups(step: int, history: Sequence[Model]) -> list[TrajectoryGroup]:
    """Return the groups of a step; the weights of one and two steps ago have sampled their tokens.

    Tokens and rewards are the same in every step, so that their probabilities move far in a few.

    Args:
        step: From 0; also the version of the trainer's weights.
        history: Version -> model.
    """
    generator, groups = torch.Generator().manual_seed(100), []
    oldest, newest = max(step - STALENESS, 0), max(step - 1, 0)
    for place in range(UPDATES * GROUPS_PER_UPDATE):
        prompt, trajectories = torch.randint(3, 64, (PROMPT_LENGTH,), generator=generator), []
        for index in range(GROUP):
            length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
            tokens = torch.cat([prompt, torch.randint(3, 64, (length,), generator=generator)])
            counts = (length // 2, length - length // 2)
            rows = [token_logprobs(history[version], tokens) for version in (oldest, newest)]
            recorded = torch.cat([rows[0][: counts[0]], rows[1][counts[0] :]])
            spans = tuple(map(VersionSpan, (oldest, newest), counts))
            reward = REWARD_SCALE * float(torch.rand((), generator=generator))
            trajectory = Trajectory.of_response(
                tokens[:PROMPT_LENGTH].tolist(), tokens[PROMPT_LENGTH:].tolist(), recorded.tolist(), versions=spans,
                prompt_id=place, sample_index=index, reward=reward
            )  # fmt: skip
            trajectories.append(trajectory)
        groups.append(TrajectoryGroup(Prompt(place, (), ""), tuple(trajectories)))
    return groups


@torch.no_grad()
def token_logprobs(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token after the prompt."""
    logits = model(tokens[None]).logits[0, PROMPT_LENGTH - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, tokens[PROMPT_LENGTH:, None])[:, 0]


# ---- ours ----


@dataclass
class Ours:
    """Our objective on the product's updates.

    Args:
        model: Trained in place.
        config: For the cut into updates and micro-batches.
        objective: The loss.
        highest: The correction's upper bound.
        shares: Shares of an update's tokens that the clip, and that the correction's bounds have changed; one row each.
    """

    model: Model
    config: Config
    objective: Objective
    highest: float
    shares: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self, groups: Sequence[TrajectoryGroup]) -> Iterator[float]:
        """See `Trainer`."""
        updates = make_updates(self.config, self.objective, groups, 0)
        assert len(updates) == UPDATES
        assert all(update.num_micro_batches > 1 for update in updates)
        with torch.no_grad():
            old = [[logprobs_of(self.model, batch) for batch in update.batches] for update in updates]
        for update, logprobs in zip(updates, old, strict=True):
            self._optimizer.zero_grad()
            loss, changed = 0.0, torch.zeros(2)
            for micro_batch in update.with_old_logprobs(logprobs).micro_batches(self.objective.needs):
                tokens = micro_batch.tokens
                losses, statistics = self.objective.token_losses(logprobs_of(self.model, micro_batch.packed), tokens)
                weighted = (losses * tokens.weights).sum()
                weighted.backward()
                loss += weighted.item()
                factors = statistics.get("correction_mean", torch.ones(len(losses)))
                is_bounded = (factors == 0) | (factors == self.highest)
                changed += torch.stack([statistics["clip_fraction"], is_bounded])[:, tokens.is_response].sum(1)
            self._optimizer.step()
            self.shares.append((changed / sum(one.num_sampled for one in update.trajectories)).tolist())
            yield loss


# ---- TRL's ----


@dataclass(frozen=True)
class Case:
    """One loss in both implementations.

    Args:
        preset: Line of `config/algorithms.yaml`.
        ours: Keys of the section `algorithm` that differ from it.
        theirs: Arguments of TRL's configuration.
        on_sampler: The ratio's denominator is the sampler's probability, without a correction.
    """

    preset: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    on_sampler: bool = False


BOUNDS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
EPSILONS = {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.15}
IS = "vllm_importance_sampling_"


def corrected(mode: str, high: float, low: float | None = None) -> dict[str, Any]:
    return EPSILONS | {f"{IS}mode": mode, f"{IS}clip_max": high, f"{IS}clip_min": low}


CASES = {
    "tis": Case("tis", BOUNDS, corrected("token_truncate", 2.0)),
    "tis of sequences": Case("tis", BOUNDS | {"correction_level": "sequence"}, corrected("sequence_truncate", 2.0)),
    "icepop": Case("icepop", BOUNDS, corrected("token_mask", 5.0, 0.5)),
    "mis": Case("mis", BOUNDS, corrected("sequence_mask", 2.0)),
    "the sampler's ratio": Case("grpo", BOUNDS | {"old_logprobs": "engine"}, EPSILONS, on_sampler=True),
    "the sampler's ratio of sequences": Case(
        "gspo",
        BOUNDS | {"old_logprobs": "engine"},
        EPSILONS | {"importance_sampling_level": "sequence"},
        on_sampler=True,
    ),
}


@dataclass
class Theirs:
    """TRL's GRPO trainer: its advantages, its correction, its loss."""

    model: Model
    case: Case
    folder: Path

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        self._trainer = make_trainer(
            self.model, self.folder, corrects=True, num_generations=GROUP, steps_per_generation=UPDATES,
            per_device_train_batch_size=GROUPS_PER_UPDATE * GROUP,
            **{f"{IS}correction": not self.case.on_sampler}, **self.case.theirs
        )  # fmt: skip

    def step(self, groups: Sequence[TrajectoryGroup]) -> Iterator[float]:
        """See `Trainer`."""
        trajectories = [one for group in groups for one in group.trajectories]
        self._trainer._generate = partial(recorded, trajectories)
        self._trainer.reward_funcs = [lambda completions, **_: [one.reward for one in trajectories]]
        self._trainer._current_train_step_time = 0.0
        inputs = self._trainer._generate_and_score_completions([{"prompt": str(one.prompt_id)} for one in trajectories])
        if self.case.on_sampler:
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        size = len(trajectories) // UPDATES
        for first in range(0, len(trajectories), size):
            part = {name: rows[first : first + size] if rows.dim() else rows for name, rows in inputs.items()}
            self._optimizer.zero_grad()
            loss = self._trainer._compute_loss(self.model, part)
            loss.backward()
            self._optimizer.step()
            yield loss.item()


def recorded(trajectories: Sequence[Trajectory], prompts: list) -> tuple:
    """Return what TRL's generation would: these responses, with the sampler's log-probabilities."""
    prompt_ids, responses, logprobs = (
        [list(row) for row in rows]
        for rows in zip(*((one.prompt_tokens, one.sampled_tokens, one.logprobs) for one in trajectories), strict=True)
    )
    return prompt_ids, responses, None, [""] * len(responses), logprobs, {}, None, []


# ---- NumPy's ----


@dataclass(frozen=True)
class Equation:
    """A loss that TRL does not have.

    Args:
        preset: Line of `config/algorithms.yaml`.
        ours: Keys of the section `algorithm` that differ from it.
        of_sequence: Log-probability ratios of a response's tokens -> the log of the policy's ratio; None: each token's.
        correction: Log-probability ratios of trainer and sampler -> factors.
    """

    preset: str
    ours: dict[str, Any]
    of_sequence: Callable[[np.ndarray], np.ndarray] | None
    correction: Callable[[np.ndarray], np.ndarray]


def mask(ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


EQUATIONS = {
    "tis by the geometric mean": Equation(
        "tis",
        BOUNDS | {"correction_level": "geometric", "correction_high": 1.2},
        None,
        lambda d: np.minimum(np.exp(d.mean()), 1.2),
    ),
    "mis by the geometric mean": Equation(
        "mis",
        BOUNDS | {"correction_level": "geometric", "correction_low": 0.8, "correction_high": 1.2},
        None,
        lambda d: mask(np.exp(d.mean()), 0.8, 1.2),
    ),
    "icepop of a sequence's ratio": Equation(
        "icepop", BOUNDS | {"ratio_level": "sequence"}, np.sum, lambda d: mask(np.exp(d), 0.5, 5.0)
    ),
}


@dataclass
class Numpy:
    """The loss and its derivative by each log-probability, in FP64; torch takes over from there."""

    model: Model
    equation: Equation

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self, groups: Sequence[TrajectoryGroup]) -> Iterator[float]:
        """See `Trainer`."""
        rewards = np.array([[one.reward for one in group.trajectories] for group in groups])
        advantages = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, ddof=1, keepdims=True)
        trajectories = [one for group in groups for one in group.trajectories]
        old = [token_logprobs(self.model, torch.tensor(one.tokens)).double().numpy() for one in trajectories]
        rows, size = [*zip(trajectories, old, advantages.ravel(), strict=True)], len(trajectories) // UPDATES
        for first in range(0, len(rows), size):
            self._optimizer.zero_grad()
            loss = 0.0
            for trajectory, before, advantage in rows[first : first + size]:
                tokens = torch.tensor(trajectory.tokens)
                logits = self.model(tokens[None]).logits[0, PROMPT_LENGTH - 1 : -1] / TEMPERATURE
                now = torch.log_softmax(logits, -1).gather(1, tokens[PROMPT_LENGTH:, None])[:, 0]
                value, slope = self._loss(now.detach().double().numpy(), before, trajectory.logprobs, advantage)
                now.backward(torch.tensor(slope / size, dtype=torch.float32))
                loss += value / size
            self._optimizer.step()
            yield loss

    def _loss(
        self, now: np.ndarray, before: np.ndarray, sampler: Sequence[float], advantage: float
    ) -> tuple[float, np.ndarray]:
        """Return the mean loss of a response's tokens, and its derivative by each log-probability."""
        factors = self.equation.correction(before - np.array(sampler)) * np.ones(len(now))
        moved, whole = now - before, self.equation.of_sequence
        ratio = np.exp(moved if whole is None else np.full(len(now), whole(moved)))
        if whole:
            # Masked tokens are outside the policy's ratio, too.
            ratio = np.where(factors > 0, ratio, 1.0)
        low, high = 1 - BOUNDS["clip_ratio_low"], 1 + BOUNDS["clip_ratio_high"]
        free, bounded = -ratio * advantage, -np.clip(ratio, low, high) * advantage
        slope = np.where(bounded > free, 0.0, free) * factors / len(now)
        return (np.maximum(free, bounded) * factors).mean(), slope if whole is None else np.full(len(now), slope.sum())


# ---- both ----


def train_both(start: Model, ours: Ours, theirs: Model, step: Trainer) -> None:
    """Train both models on the same trajectories; compare losses and weights after every update."""
    history, ages = [], set[str]()
    for number in range(NUM_STEPS):
        # A copy of a model that TRL trains would call the original's `forward`.
        history.append(copy.deepcopy(start))
        history[-1].load_state_dict(theirs.state_dict())
        groups = sample_groups(number, history)
        ages |= {name for name in staleness_metrics(number, groups) if name.startswith("queue/age_")}
        losses = [*zip(ours_and_weights(ours, groups), losses_and_weights(theirs, step, groups), strict=True)]
        for (our_loss, our_weights), (their_loss, their_weights) in losses:
            assert our_loss == pytest.approx(their_loss, abs=TOLERANCE)
            assert (our_weights - their_weights).abs().max() <= TOLERANCE
    assert ages == {"queue/age_0", "queue/age_1", "queue/age_2"}
    assert_equal_moves(start, ours.model, theirs)


def ours_and_weights(ours: Ours, groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[float, torch.Tensor]]:
    return losses_and_weights(ours.model, ours.step, groups)


def losses_and_weights(
    model: Model, step: Trainer, groups: Sequence[TrajectoryGroup]
) -> Iterator[tuple[float, torch.Tensor]]:
    for loss in step(groups):
        yield loss, torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("name", list(CASES))
def test_stale_trajectories_have_trl_s_losses_and_move_weights_as_in_trl(
    start: Model, config: Config, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    ours = make_ours(start, config, case)
    theirs = copy.deepcopy(start)
    train_both(start, ours, theirs, Theirs(theirs, case, tmp_path).step)
    clipped, bounded = map(max, zip(*ours.shares, strict=True))
    assert clipped > 0.05, "nothing is shown where nothing is clipped"
    assert case.on_sampler or bounded > 0.05, "nothing is shown where no factor is at a bound"


@pytest.mark.parametrize("name", list(EQUATIONS))
def test_losses_that_trl_does_not_have_are_those_of_their_equations(start: Model, config: Config, name: str) -> None:
    equation = EQUATIONS[name]
    ours = make_ours(start, config, equation)
    theirs = copy.deepcopy(start)
    train_both(start, ours, theirs, Numpy(theirs, equation).step)
    assert all(max(shares) > 0.05 for shares in zip(*ours.shares, strict=True))


def make_ours(start: Model, config: Config, case: Case | Equation) -> Ours:
    chosen = settings(case.preset, **case.ours)
    return Ours(copy.deepcopy(start), config, PolicyGradient(chosen, LONGEST), chosen.correction_high)

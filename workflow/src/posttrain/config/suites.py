"""Turns suites into the held-out prompts of separate configurations, so that both are evaluated by the same code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.config.calibration import CalibrationPass, pass_data
from posttrain.config.data import UNPINNED, Data
from posttrain.config.evaluation import Suite
from posttrain.config.schema import Config
from posttrain.errors import Problem

# The name of the held-out prompts among suites.
HELD_OUT = "heldout"
# Keys of a suite that determine its rows; the others are about sampling and grading.
ROW_KEYS = (
    *("kind", "file", "repo_id", "revision", "subset", "split", "prompt_key", "label_key"),
    *("system_prompt", "prompt_template", "unlabeled", "num_prompts"),
)


def eval_tasks_of(config: Config) -> Mapping[str, Config]:
    """Return the evaluations of a run by name, the held-out prompts first.

    Returns:
        Name -> a configuration whose held-out prompts are the suite's, with the suite's `data.reward`, `evaluation`
        and `rollout.max_response_tokens`.
    """
    return {HELD_OUT: config, **{name: _exam_of(config, suite) for name, suite in config.evaluation.suites.items()}}


def _exam_of(config: Config, suite: Suite) -> Config:
    evaluation, rollout, reward = config.evaluation, config.rollout, config.reward
    longest = suite.max_response_tokens or rollout.max_response_tokens
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            suite_data(suite),
            reward=suite.reward or config.data.reward,
            # Only with the run's reward: another one grades single responses.
            environment="" if suite.reward else config.data.environment,
        ),
        rollout=dataclasses.replace(rollout, max_response_tokens=longest),
        # The reward functions of suites are not part of the experiment.
        reward=dataclasses.replace(reward, own_digests=[*reward.own_digests, *evaluation.own_digests]),
        evaluation=dataclasses.replace(
            evaluation, num_samples_per_prompt=suite.num_samples_per_prompt, temperature=suite.temperature
        ),
    )


def suite_data(suite: Suite) -> Data:
    """Return a section `data` whose training prompts are a suite's rows."""
    said = {key: getattr(suite, key) for key in ROW_KEYS if key not in ("file", "num_prompts")}
    # Duplicates in a suite are its author's decision.
    fixed: dict[str, Any] = {"num_heldout_prompts": 1, "seed": 0, "reward": suite.reward, "duplicates": "keep"}
    return Data(train_file=suite.file, **said, **fixed)


def rows_of(wanted: Suite | CalibrationPass) -> dict[str, Any]:
    """Return the settings that determine the rows of a suite or of a calibration pass."""
    return {key: getattr(wanted, key) for key in ROW_KEYS} if isinstance(wanted, Suite) else dict(vars(wanted))


def data_of(wanted: Suite | CalibrationPass) -> Data:
    """Return a section `data` whose training prompts are the rows of a suite or of a calibration pass."""
    return suite_data(wanted) if isinstance(wanted, Suite) else pass_data(wanted)


def suite_rewards(config: Config) -> dict[str, str]:
    """Return key -> reward of each suite."""
    suites = config.evaluation.suites.items()
    return {f"evaluation.suites.{name}.reward": suite.reward for name, suite in suites if suite.reward}


def evaluation_settings(config: Config) -> dict[str, Any]:
    """Return the settings that determine an evaluation before or after training; without suites as in version 0.1."""
    evaluation = config.evaluation
    settings = {key: getattr(evaluation, key) for key in ("num_samples_per_prompt", "temperature", "seed")}
    if evaluation.suites:
        settings |= {
            "suites": {name: dataclasses.asdict(suite) for name, suite in evaluation.suites.items()},
            "own_digests": evaluation.own_digests,
        }
    return settings


def evaluation_is_due(config: Config, finished: int) -> bool:
    """Return whether suites are evaluated after this many steps."""
    interval = config.evaluation.interval
    return interval > 0 and finished > 0 and finished % interval == 0


def check_pinned(config: Config) -> Iterator[Problem]:
    """Yield suites that can be planned but not downloaded."""
    for name, suite in config.evaluation.suites.items():
        if suite.kind == "hub" and suite.revision == UNPINNED:
            key = f"evaluation.suites.{name}.revision"
            remedy = f"give the commit that the page of {suite.repo_id} shows"
            yield Problem(
                "revision-not-pinned", key, UNPINNED, "40 hex digits to fetch it; it can be planned as it is", remedy
            )

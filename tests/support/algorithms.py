"""Objectives and micro-batches for tests of the algorithms' parts."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import torch

from posttrain.plan.resolve import resolve
from posttrain.rl.algorithm.objective import TokenBatch
from posttrain.rl.algorithm.policy_gradient import PolicyGradient
from posttrain.rl.algorithm.settings import Algorithm

CONFIG_DIR = Path(__file__).parents[2] / "config"


@lru_cache
def preset(name: str = "grpo") -> Algorithm:
    """Return the settings of a line of `config/algorithms.yaml`."""
    return resolve({"model": "tiny", "site": "local", "set": f"algorithm.preset={name}"}, CONFIG_DIR).config.algorithm


def settings(name: str = "grpo", **changed) -> Algorithm:
    return dataclasses.replace(preset(name), **changed)


def objective(name: str = "grpo", longest: int = 6, **changed) -> PolicyGradient:
    return PolicyGradient(settings(name, **changed), longest)


def token_batch(lengths, advantages, old_logprobs=None, engine_logprobs=None) -> TokenBatch:
    """Return a row in which every token is a response's; one advantage per sequence."""
    spread = torch.repeat_interleave(torch.as_tensor(advantages, dtype=torch.float32), torch.tensor(lengths))
    ones = torch.ones(sum(lengths))
    return TokenBatch(tuple(lengths), ones > 0, spread, ones, old_logprobs, engine_logprobs)

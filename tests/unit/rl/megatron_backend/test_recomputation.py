"""Recomputation changes no bit: modules, layers or nothing computed again, on one rank and where ranks share layers."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.chosen_keys import attend_by, reference_kernel
from tests.support.megatron_single import run_ranks
from tests.support.recomputed_updates import MODULES, settings, with_setting
from tests.support.small_updates import LR, apply, trained_config, updates_of, weights_of

from posttrain.rl.megatron_backend.glm5.indexer import Indexer

ROOT = Path(__file__).parents[4]
LAYOUTS = {
    "tensor, expert and pipeline": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
    "interleaved and context": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    },
}
KINDS = {"fp32": None, "bf16": None, "fp32 latents": reference_kernel}


def settings_of(kind: str) -> dict[str, dict[str, Any]]:
    dtype = kind.split()[0]
    alone = {module: {"recompute_granularity": "selective", "recompute_modules": [module]} for module in MODULES[dtype]}
    return settings(dtype) | {name: {"params_dtype": dtype, **keys} for name, keys in alone.items()}


@pytest.fixture(scope="module")
def updated(make_policy):
    """Return what makes the updates of a step with a setting, and tells what they said and the weights after them."""

    @cache
    def update(kind: str, name: str) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, float]]:
        policy = make_policy(with_setting(trained_config(), settings_of(kind)[name]))
        if KINDS[kind]:
            attend_by(KINDS[kind], policy.chunks)
        said = [dataclasses.asdict(apply(policy, each, LR)) for each in updates_of(policy, 0)]
        return said, weights_of(policy), policy.expert_load.take()

    return update


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in settings_of(kind)][1:])
def test_recomputation_changes_no_bit(updated, kind: str, name: str) -> None:
    """Nor does it count a token twice at a router."""
    (kept_said, kept, kept_load), (said, weights, load) = updated(kind, "none"), updated(kind, name)
    assert said == kept_said
    assert load == kept_load
    assert all(torch.equal(weights[key], kept[key]) for key in kept)


@pytest.mark.parametrize(("kept", "again"), [("none", 4), ("all", 0)])
def test_recomputation_reads_the_keys_that_the_forward_pass_has_chosen(
    make_policy, monkeypatch, kept: str, again: int
) -> None:
    """Four layers: each chooses in the forward pass of a micro-batch, and again where no choice is kept."""
    policy = make_policy(with_setting(trained_config(), {"recompute_granularity": "full", "keep_index_choice": kept}))
    update = updates_of(policy, 0)[0]
    rows, choose = [], Indexer.choose

    def counted(indexer: Indexer, *given: Any) -> torch.Tensor:
        rows.append((torch.is_grad_enabled(), given[-1]))
        return choose(indexer, *given)

    monkeypatch.setattr(Indexer, "choose", counted)
    apply(policy, update, LR)
    of_row = Counter((id(sequences), is_recomputed) for is_recomputed, sequences in rows)
    assert len({id(sequences) for _, sequences in rows}) == len(update.batches)
    for _, sequences in rows:
        assert (of_row[id(sequences), False], of_row[id(sequences), True]) == (4, again)
        assert not sequences.choices, "the backward pass has used it up"


def test_a_pass_without_backward_keeps_no_choice(make_policy, monkeypatch) -> None:
    config = with_setting(trained_config(), {"recompute_granularity": "full", "keep_index_choice": "all"})
    policy, rows, choose = make_policy(config), [], Indexer.choose
    monkeypatch.setattr(Indexer, "choose", lambda *given: rows.append(given[-1]) or choose(*given))
    updates_of(policy, 0)
    assert rows
    assert not any(sequences.choices for sequences in rows)


@pytest.mark.parametrize(("dtype", "by_kernel"), [("bf16", False), ("fp32", True)], ids=["masked", "latents"])
def test_ranks_that_share_layers_get_the_same_weights(checkpoint, dtype: str, by_kernel: bool) -> None:
    request = {"root": str(ROOT), "checkpoint": str(checkpoint[0]), "ranks": 4, "layouts": LAYOUTS}
    words = json.dumps({**request, "dtype": dtype, "by_kernel": by_kernel})
    output = run_ranks(ROOT / "tests/support/recomputed_updates.py", 4, words, timeout=500)[0]
    found = json.loads(output.splitlines()[-1])
    assert found.keys() == LAYOUTS.keys()
    for layout, by_setting in found.items():
        for name, said in by_setting.items():
            assert said == by_setting["none"], (layout, name)


def test_what_a_function_returns_is_dropped_until_it_is_needed() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    from posttrain.rl.megatron_backend.recomputation import DroppedOutputs

    calls, x = [], torch.arange(4.0, requires_grad=True)
    dropped = DroppedOutputs(is_wanted=True)
    square = dropped.run(lambda value: calls.append(1) or value.square(), x)
    result = square * square
    dropped.drop_until_gradient_of(result)
    assert (len(calls), square.untyped_storage().nbytes()) == (1, 0)
    result.sum().backward()
    assert (len(calls), x.grad.tolist()) == (2, [0.0, 4.0, 32.0, 108.0])
    assert megatron_random._share_storage_ext is None, "no compiler was asked for"

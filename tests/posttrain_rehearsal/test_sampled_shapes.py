"""Lengths and loads that a user sets: what is drawn from them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.rejections import rejected

from posttrain.config.load import Resolved
from posttrain.errors import ConfigError
from posttrain.plan.sizing.assumptions import ASSUMPTIONS, Assumptions
from posttrain_rehearsal.sampled_shapes import SampledShapes, sampled_shapes_of
from posttrain_rehearsal.samples import MadeUpRollouts, shortened
from posttrain_rehearsal.script import Unknown

Resolve = Callable[..., Resolved]


def written(folder: Path, text: str) -> str:
    path = folder / "lengths.txt"
    path.write_text(text)
    return str(path)


def test_nothing_is_asked_for(resolved: Resolve) -> None:
    assert sampled_shapes_of(resolved("qwen3_4b")) == SampledShapes()


def test_both_steps_are_drawn_from_the_lengths_and_the_second_is_longer(resolved: Resolve, tmp_path: Path) -> None:
    found = resolved("qwen3_4b", lengths=written(tmp_path, "7 100\n\n9 300\n5 4000\n"))
    drawn = sampled_shapes_of(found)
    assert drawn.lengths == ((7, 100), (9, 300), (5, 4000))
    config = shortened(found.config, drawn)
    steps = [
        [
            (len(s.prompt_tokens), s.num_sampled)
            for g in MadeUpRollouts(config, drawn).of_step(step).groups
            for s in g.trajectories
        ]
        for step in (1, 2)
    ]
    assert {*steps[0], *steps[1]} == {*drawn.lengths}
    assert len(steps[0]) == len(steps[1]) == config.training.global_batch_size
    assert max(map(sum, steps[0])) <= min(map(sum, steps[1]))
    # As many tokens as rows of the longest samples have, so that there are as many micro-batches.
    longest = shortened(found.config)
    tokens = [sum(s.num_tokens for g in MadeUpRollouts(longest).of_step(2).groups for s in g.trajectories)]
    assert sum(map(sum, steps[0] + steps[1])) / 2 == pytest.approx(tokens[0], rel=0.2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an empty file"),
        ("7 100\n7\n", "line 2: 7"),
        ("7 0\n", "line 1: 7 0"),
        ("7 1e3\n", "line 1: 7 1e3"),
        ("7 -3\n", "line 1: 7 -3"),
        ("7 ²\n", "line 1: 7 ²"),
        ("1 999999\n", "line 1: 1 999999"),
        ("999999 1\n", "line 1: 999999 1"),
    ],
)
def test_lengths_that_there_cannot_be(resolved: Resolve, tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sampled_shapes_of(resolved("qwen3_4b", lengths=written(tmp_path, text)))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("lengths", told)]


def test_a_file_that_is_not_there(resolved: Resolve) -> None:
    with rejected("not-lengths", "nowhere", key="lengths"):
        sampled_shapes_of(resolved("qwen3_4b", lengths="/nowhere"))


@pytest.mark.parametrize("value", [0.5, "much", True, float("nan"), float("inf")])
def test_an_imbalance_that_there_cannot_be(resolved: Resolve, value: object) -> None:
    with rejected("out-of-range", key="expert_imbalance"):
        resolved("qwen3_30b_a3b", expert_imbalance=value)


def test_the_first_ranks_experts_get_so_many_times_the_mean(resolved: Resolve) -> None:
    found = resolved("qwen3_30b_a3b", expert_imbalance=3)
    arch, ranks = found.config.model.architecture, found.config.parallel.expert_model_parallel_size

    def share(assumptions: Assumptions) -> float:
        draw = Unknown(found.config, assumptions, 0)
        scores = torch.zeros(20000, arch.n_routed_experts)
        _, chosen = draw(torch.ops.aten.topk.default, (scores, arch.num_experts_per_tok))
        return (chosen < arch.n_routed_experts // ranks).float().mean().item() * ranks

    assert sampled_shapes_of(found).assumptions.expert_imbalance == 3
    assert share(ASSUMPTIONS) == pytest.approx(1.5, rel=0.01)
    assert share(sampled_shapes_of(found).assumptions) == pytest.approx(3, rel=0.01)

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.load import Resolved
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.problems import find_problems, find_warnings
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.memory_phases import phase_memory
from posttrain.plan.sizing.untracked_memory import uncertainty_gib, untracked_terms

CONFIG = Path(__file__).parents[4] / "config"


def config_of(model, **words):
    return resolve({"site": "local", "model": model, **words}, CONFIG).config


def test_the_terms_are_what_the_plan_reserves():
    for model, count in (("glm5_4layer", 3), ("qwen3_4b", 2)):
        config = config_of(model)
        terms = untracked_terms(config)
        assert len(terms) == count, "who has no experts has no buffers for them"
        assert all(term.least <= term.gib <= term.most and "#" in term.source for term in terms)
        assert phase_memory(config)[0].gpu["reserve"] == pytest.approx(sum(term.gib for term in terms))
    assert untracked_terms(config_of("tiny", hardware="cpu")) == []


def test_what_was_reported_of_each_term():
    """Of a process, with DeepEP; two processes share a GPU where engines have none of their own."""
    counted = dataclasses.replace(ASSUMPTIONS, cuda_context=0.75, nccl=2.0, deepep=1.0)
    for words, processes in (("", 2), ("engine.own_nodes=1", 1)):
        terms = untracked_terms(config_of("glm5_4layer", nodes=2, set=words), counted)
        assert [(term.gib, term.least, term.most) for term in terms] == [
            (processes * 0.75, processes * 0.3, processes * 1.0),
            (2.0, 0.5, 5.6),
            (1.0, 0.5, 2.8),
        ]
    given = untracked_terms(config_of("qwen3_4b", recipe="sft"), counted)
    assert [term.gib for term in given] == [0.75, 2.0]
    without = untracked_terms(config_of("glm5_4layer", set="trainer.deepep=false"), counted)
    assert [term.name for term in without] == ["CUDA contexts and loaded kernels", "communicators of NCCL"]
    more = untracked_terms(config_of("qwen3_4b"), dataclasses.replace(counted, nccl=7.0))
    assert (more[1].gib, more[1].most) == (7.0, 7.0)


def test_how_much_more_it_may_be_is_a_sum():
    config = config_of("qwen3_4b")
    contexts, nccl = ASSUMPTIONS.cuda_context, ASSUMPTIONS.nccl
    assert uncertainty_gib(config) == pytest.approx(2 * max(0, 1 - contexts) + max(0, 5.6 - nccl))


def test_nothing_is_said_to_fit_within_what_is_not_known():
    config = config_of("qwen3_4b")
    for room, is_sure in ((0.1, False), (uncertainty_gib(config) + 0.1, True)):
        # Less memory is a smaller pool: the rollout's need shrinks with it.
        sizes = (with_memory(config, tenths / 10) for tenths in range(10, 2000))
        tight = next(made for made in sizes if made.hardware.memory_gib_per_gpu - most(made) >= room)
        assert find_problems(tight) == []
        is_named = "leave room; it may fit, and may not" in [found.remedy for found in find_warnings(tight)]
        assert is_named != is_sure
        phases = build_plan(Resolved(tight, {}, "run"))["trainer"]["phases"]
        assert all(phase["fits"] for phase in phases)
        assert all(phase["surely_fits"] for phase in phases) == is_sure


def with_memory(config, gib):
    return dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, memory_gib_per_gpu=gib))


def most(config):
    return max(row.gpu_gib for row in phase_memory(config))

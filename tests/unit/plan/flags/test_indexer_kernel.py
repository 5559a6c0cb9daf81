"""What chooses the keys of sparse attention: Triton kernels where they can run, otherwise torch."""

from __future__ import annotations

import dataclasses

import pytest

from posttrain.config.command_line import CONFIG_DIR
from posttrain.plan.flags.indexer_kernel import check_indexer_kernel, indexer_kernel
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve


def chosen(model="glm5_4layer", hardware=None, head_dim=None, capability=None, **trainer):
    request = {"model": model, "site": "local"} | ({"hardware": hardware} if hardware else {})
    config = resolve(request | ({"set": "rollout.fp8=false"} if hardware == "mi300x" else {}), CONFIG_DIR).config
    arch = dataclasses.replace(config.model.architecture, **({"index_head_dim": head_dim} if head_dim else {}))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, architecture=arch),
        hardware=dataclasses.replace(config.hardware, **({"compute_capability": capability} if capability else {})),
        trainer=dataclasses.replace(config.trainer, **trainer),
    )


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        ({}, "fused", "a twentieth of the bytes"),
        ({"hardware": "gb300"}, "fused", "a twentieth of the bytes"),
        ({"hardware": "mi300x"}, "fused", "a twentieth of the bytes"),
        ({"capability": "12.0"}, "torch", "compute capability 12.0 have too little shared memory"),
        ({"params_dtype": "fp32"}, "torch", "the kernels take BF16"),
        ({"head_dim": 256}, "torch", "heads of up to 128 numbers, and the model's have 256"),
        ({"indexer_kernel": "torch"}, "torch", "asks for it"),
        ({"model": "tiny"}, "torch", "do not run on a CPU"),
        ({"model": "tiny", "indexer_kernel": "fused"}, "torch", "do not run on a CPU"),
        ({"model": "qwen3_0.6b"}, "", "all keys"),
    ],
)
def test_what_is_chosen(given, name, reason):
    kernel = indexer_kernel(chosen(**given))
    assert kernel.name == name
    assert reason in kernel.reason
    assert check_indexer_kernel(chosen(**given)) == []


@pytest.mark.parametrize("given", [{"capability": "12.0"}, {"params_dtype": "fp32"}, {"head_dim": 256}])
def test_kernels_that_cannot_run_are_refused(given):
    problems = find_problems(chosen(**given, indexer_kernel="fused"))
    problem = next(problem for problem in problems if problem.key == "trainer.indexer_kernel")
    assert (problem.value, problem.remedy) == ("fused", "trainer.indexer_kernel=auto")
    assert indexer_kernel(chosen(**given)).reason in problem.allowed

"""Which kernel sparse attention runs on: Megatron's own declines, as the plan tells them before."""

from __future__ import annotations

import dataclasses

import pytest

from posttrain.config.command_line import CONFIG_DIR
from posttrain.plan.flags.sparse_kernels import MASKED, check_sparse_kernel, cudnn_heads, sparse_kernel
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve


def chosen(model="glm5", hardware=None, tensor=None, asked=None, dtype=None, **architecture):
    request = {"model": model, "site": "local"} | ({"hardware": hardware} if hardware else {})
    config = resolve(request | ({"set": "rollout.fp8=false"} if hardware == "mi300x" else {}), CONFIG_DIR).config
    arch = dataclasses.replace(config.model.architecture, **architecture)
    trainer = {"sparse_attention": asked, "params_dtype": dtype}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, architecture=arch),
        trainer=dataclasses.replace(config.trainer, **{key: value for key, value in trainer.items() if value}),
        parallel=dataclasses.replace(config.parallel, **({"tensor_model_parallel_size": tensor} if tensor else {})),
    )


def test_glm5_takes_the_kernel_that_computes_fewest_heads():
    kernel = sparse_kernel(chosen(tensor=4))
    assert kernel.name == "tilelang"
    assert "16 heads where a rank has 16, cuDNN's 64" in kernel.reason
    assert check_sparse_kernel(chosen(tensor=4)) == []


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        ({"model": "tiny"}, MASKED, "no kernel for chosen keys runs on a CPU"),
        ({"model": "tiny", "hardware": "h100"}, MASKED, "made for keys of 512 + 64 numbers"),
        ({"model": "glm5_4layer", "hardware": "mi300x"}, MASKED, "not known to run on mi300x"),
        ({"asked": "masked"}, MASKED, "asks for it"),
        ({"index_topk": 2000}, "cudnn", "TileLang's kernel does not take the shapes"),
        ({"model": "qwen3_0.6b"}, "", "all keys"),
    ],
)
def test_what_else_is_chosen(given, name, reason):
    kernel = sparse_kernel(chosen(**given))
    assert kernel.name == name
    assert reason in kernel.reason
    assert check_sparse_kernel(chosen(**given)) == []


@pytest.mark.parametrize(
    ("given", "key", "nearest"),
    [
        ({"tensor": 4, "num_attention_heads": 96}, "parallel.tensor_model_parallel_size", "size=3 or"),
        (
            {"asked": "cudnn", "tensor": 2, "num_attention_heads": 192},
            "parallel.tensor_model_parallel_size",
            "size=3 or",
        ),
        ({"asked": "tilelang", "index_topk": 2000}, "model.architecture.index_topk", "1984 or 2048"),
        ({"dtype": "fp32"}, "trainer.params_dtype", "bf16"),
        ({"asked": "tilelang", "kv_lora_rank": 256}, "trainer.sparse_attention", "masked"),
        ({"asked": "cudnn", "model": "glm5_4layer", "hardware": "mi300x"}, "hardware.compute_capability", "masked"),
        ({"asked": "tilelang", "model": "glm5_4layer", "hardware": "mi300x"}, "hardware.compute_capability", "masked"),
    ],
)
def test_what_would_go_slowly_without_a_word_is_refused(given, key, nearest):
    problem = next(problem for problem in check_sparse_kernel(chosen(**given)) if problem.key == key)
    assert nearest in problem.remedy


def test_the_plan_asks():
    assert "trainer.params_dtype" in {problem.key for problem in find_problems(chosen(dtype="fp32"))}


@pytest.mark.parametrize(
    ("capability", "heads", "computed"),
    [((9, 0), 16, 64), ((9, 0), 64, 64), ((9, 0), 128, 128), ((9, 0), 96, 0), ((10, 0), 128, 128), ((10, 0), 192, 0)],
)
def test_heads_of_cudnn_by_hand(capability, heads, computed):
    assert cudnn_heads(heads, capability) == computed

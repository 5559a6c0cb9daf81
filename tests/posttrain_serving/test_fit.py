from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.serving_cases import all_hardware, checkpoint, machine

from posttrain.errors import ConfigError
from posttrain.plan.sizing.engine import serving_gib_per_gpu
from posttrain_serving.fit import Size, choose_size
from posttrain_serving.serve_request import ServeRequest


def size(what: str, hardware: str, precision: str, **serve_request: object) -> Size:
    found = checkpoint(what, precision if what == "glm5" else "")
    config = machine(hardware)
    config = replace(config, model=replace(config.model, name=found.name, architecture=found.architecture))
    return choose_size(ServeRequest.of(serve_request), precision, config, all_hardware())


@pytest.mark.parametrize(
    ("what", "hardware", "precision", "serve_request", "expected"),
    [
        ("glm5", "b200", "nvfp4", {"engine": "vllm"}, (4, 1)),
        ("glm5", "rtx_pro_6000", "nvfp4", {}, (8, 1)),
        ("glm5", "b200", "nvfp4", {"engine": "trtllm"}, (8, 1)),
        ("glm5", "gb300", "fp8", {}, (4, 1)),
        ("glm5", "gb300", "bf16", {}, (8, 2)),
        ("glm5", "h200", "fp8", {"nodes": 2}, (16, 2)),
        ("glm5", "h200", "fp8", {"nodes": 4, "prefill_apart": True}, (16, 2)),
        ("glm5", "h100", "bf16", {"goal": "throughput"}, (64, 8)),
        ("qwen3_0.6b", "h100", "bf16", {}, (1, 1)),
        ("qwen3_0.6b", "cpu", "bf16", {"engine": "embedded"}, (1, 1)),
        # 62 GiB in BF16: no more GPUs than divide its heads.
        ("qwen3_30b_a3b", "h100", "bf16", {}, (1, 1)),
    ],
)
def test_the_smallest_that_fits(what, hardware, precision, serve_request, expected):
    found = size(what, hardware, precision, **serve_request)
    assert (found.num_gpus, found.nodes) == expected


@pytest.mark.parametrize(
    ("hardware", "precision", "serve_request", "nearest"),
    [
        ("h100", "bf16", {"nodes": 1}, "--nodes 4 (32 GPUs); --hardware mi300x"),
        ("h100", "fp8", {"nodes": 1}, "--nodes 2 (16 GPUs); --hardware h200"),
        ("h200", "bf16", {"nodes": 1}, "--nodes 2 (16 GPUs); --precision fp8; --hardware mi300x"),
        ("mi300x", "bf16", {"nodes": 1, "goal": "throughput"}, "--nodes 2 (16 GPUs); --goal latency, which needs less"),
        ("h200", "bf16", {"nodes": 2, "prefill_apart": True}, "--nodes 4 (16 GPUs); --precision fp8"),
        ("h100", "bf16", {"engine": "embedded"}, "--engine sglang (32 GPUs)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(hardware, precision, serve_request, nearest):
    with pytest.raises(ConfigError) as refused:
        size("glm5", hardware, precision, **serve_request)
    (problem,) = refused.value.problems
    assert problem.remedy.startswith(nearest)
    assert "at most" in problem.allowed


def test_each_remedy_works():
    """What is named as the nearest is tried."""
    for hardware, precision, goal in (("h100", "fp8", "latency"), ("h200", "bf16", "latency")):
        with pytest.raises(ConfigError) as refused:
            size("glm5", hardware, precision, nodes=1, goal=goal)
        for words in refused.value.problems[0].remedy.split("; "):
            option, value = words.split()[:2]
            if option == "--nodes":
                assert size("glm5", hardware, precision, nodes=int(value)).nodes == int(value)
            elif option == "--precision":
                assert size("glm5", hardware, value, nodes=1).nodes == 1
            else:
                assert option == "--hardware"
                assert size("glm5", value, precision, nodes=1).nodes == 1


def test_another_engine_is_a_remedy_that_works():
    with pytest.raises(ConfigError) as refused:
        size("glm5", "h100", "bf16", engine="embedded")
    assert refused.value.problems[0].remedy == f"--engine sglang ({size('glm5', 'h100', 'bf16').num_gpus} GPUs)"


def test_the_embedded_engine_holds_what_it_computes_with():
    """FP8 is dequantised at load, in FP32 on a CPU."""
    arch = checkpoint("qwen3_0.6b").architecture
    for hardware, kept in (("cpu", "fp32"), ("h100", "bf16")):
        found = size("qwen3_0.6b", hardware, "fp8", engine="embedded")
        assert found.gib_per_gpu == serving_gib_per_gpu(arch, 1, kept)

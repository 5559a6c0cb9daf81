from __future__ import annotations

import dataclasses

import pytest
from tests.support.serving_cases import all_hardware, checkpoint, launch, machine

from posttrain.__main__ import OPTIONS
from posttrain.errors import ConfigError
from posttrain_serving.serve_request import ENGINES, GOALS, PRECISIONS, ServeRequest, check_serve_request, computed_with


@pytest.mark.parametrize(
    ("hardware", "serve_request", "expected"),
    [
        (
            "h200",
            {"precision": "nvfp4"},
            {"--precision": ("bf16, fp8 by sglang on h200: NVFP4", "b200 or gb300 or rtx")},
        ),
        ("h100", {"precision": "nvfp4"}, {"--precision": ("NVFP4 needs a Blackwell GPU", "--precision fp8")}),
        ("mi300x", {"precision": "fp8"}, {"--precision": ("no FP8 for it", "--precision bf16, or --hardware b200")}),
        ("mi355x", {"precision": "nvfp4"}, {"--precision": ("Blackwell", "--precision bf16")}),
        ("mi355x", {"engine": "vllm"}, {"--engine": ("no guide has GLM-5 with vLLM", "--engine sglang")}),
        (
            "b200",
            {"engine": "trtllm", "precision": "fp8"},
            {"--precision": ("trtllm takes nvfp4", "nvfp4")},
        ),
        (
            "rtx_pro_6000",
            {"engine": "trtllm", "precision": "nvfp4"},
            {"--engine": ("TensorRT-LLM's guide is for SM100", "--hardware b200")},
        ),
        (
            "b200",
            {"engine": "embedded", "precision": "nvfp4"},
            {"--precision": ("takes bf16 and fp8", "sglang")},
        ),
        ("h200", {"index_cache": True}, {"--index-cache": ("GLM-5 in FP8 with sglang", "leave it out")}),
        ("b200", {"engine": "vllm", "prefill_apart": True}, {"--prefill-apart": ("sglang on GPUs", "leave it out")}),
        ("h200", {"precision": "fp8", "prefill_apart": True, "nodes": 3}, {"--nodes": ("an even number", "--nodes 4")}),
        ("h200", {"port": 0}, {"--port": ("1 to 65535", "give a port")}),
        ("h200", {"nodes": -1}, {"--nodes": ("1 or more", "their number")}),
        ("b200", {"engine": "trtllm", "precision": "nvfp4", "nodes": 2}, {"--nodes": ("1 with trtllm", "--nodes 1")}),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(hardware, serve_request, expected):
    with pytest.raises(ConfigError) as refused:
        launch("glm5", hardware, **serve_request)
    found = {problem.key: problem for problem in refused.value.problems}
    assert found.keys() == expected.keys()
    for key, (allowed, remedy) in expected.items():
        assert allowed in found[key].allowed
        assert remedy in found[key].remedy


def test_index_cache_is_for_one_pattern_of_layers():
    """GLM-5.2 shares choices by itself, and DeepSeek has other layers."""
    for model in ("glm5.1", "glm5.2", "deepseek_v3.2"):
        found = checkpoint(model)
        config = machine("h200")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=found.architecture))
        keys = [problem.key for problem in check_serve_request(ServeRequest(index_cache=True), "fp8", config)]
        assert keys == ([] if model == "glm5.1" else ["--index-cache"])


def test_formats_by_engine_and_hardware():
    table = {
        (engine, one.name): computed_with(ServeRequest(engine=engine), one)
        for engine in ENGINES
        for one in all_hardware()
    }
    assert table["sglang", "h200"] == table["vllm", "h100"] == ["bf16", "fp8"]
    assert table["sglang", "b200"] == table["sglang", "rtx_pro_6000"] == ["bf16", "fp8", "nvfp4"]
    assert table["trtllm", "b200"] == ["nvfp4"]
    assert table["sglang", "mi355x"] == table["sglang", "cpu"] == ["bf16"]
    assert table["embedded", "cpu"] == table["embedded", "mi300x"] == ["bf16", "fp8"]


def test_the_command_line_offers_what_there_is():
    options = OPTIONS["serve"]
    assert options["--engine"]["choices"] == ENGINES
    assert options["--precision"]["choices"] == PRECISIONS
    assert options["--goal"]["choices"] == GOALS
    named = {name[2:].replace("-", "_") for name in options} - {"print", "hardware", "check", "stop"}
    assert named == {field.name for field in dataclasses.fields(ServeRequest)} - {"first_node"}

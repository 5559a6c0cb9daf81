from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.begun_runs import begin_run
from tests.support.rejections import rejected
from tests.support.serving_cases import CONFIG_DIR, checkpoint, machine
from tests.support.tiny_checkpoint import TINY, transformers_config

from posttrain.errors import ConfigError
from posttrain.plan.flags.flag import as_mapping
from posttrain.plan.resolve import resolve
from posttrain_serving.checkpoint import find_checkpoint, of_run, served_name
from posttrain_serving.launch import plan_launch
from posttrain_serving.serve_request import ServeRequest


@pytest.mark.parametrize(
    ("what", "precision", "place", "name", "found"),
    [
        ("glm5", "", "zai-org/GLM-5", "glm-5", "bf16"),
        ("glm5", "fp8", "zai-org/GLM-5-FP8", "glm-5", "fp8"),
        ("glm5", "nvfp4", "lukealonso/GLM-5-NVFP4", "glm-5", "nvfp4"),
        ("zai-org/GLM-5", "", "zai-org/GLM-5", "glm-5", "bf16"),
        ("zai-org/GLM-5", "fp8", "zai-org/GLM-5-FP8", "glm-5", "fp8"),
        ("zai-org/GLM-5-FP8", "", "zai-org/GLM-5-FP8", "glm-5", "fp8"),
        ("warnold-nv/GLM-5-nvfp4-v1", "nvfp4", "warnold-nv/GLM-5-nvfp4-v1", "glm-5", "nvfp4"),
        ("zai-org/GLM-5.2-FP8", "", "zai-org/GLM-5.2-FP8", "glm-5.2", "fp8"),
        ("Qwen/Qwen3-4B", "", "Qwen/Qwen3-4B", "qwen3-4b", "bf16"),
    ],
)
def test_models_and_repositories(what: str, precision: str, place: str, name: str, found: str) -> None:
    given = checkpoint(what, precision)
    assert (given.place, given.name, given.precision, given.is_folder) == (place, name, found, False)


def test_the_revision_that_a_models_file_pins_is_served() -> None:
    pinned = resolve({"model": "qwen3_4b", "site": "local"}, CONFIG_DIR).config.model.source.revision
    assert len(pinned) == 40
    for what in ("qwen3_4b", "Qwen/Qwen3-4B"):
        for engine in ("sglang", "vllm"):
            found = plan_launch(ServeRequest(engine), checkpoint(what), machine("h100"))
            assert as_mapping(found.processes[0].flags)["--revision"] == pinned
    # The same weights in another precision are another repository.
    assert [checkpoint(what).revision for what in ("zai-org/GLM-5-FP8", "Qwen/Qwen3-4B-FP8")] == ["", ""]
    assert checkpoint("glm5", "fp8").revision == ""


def test_a_longer_name_is_another_model() -> None:
    assert checkpoint("zai-org/GLM-5.2-FP8").architecture.index_topk_freq == 4
    assert checkpoint("zai-org/GLM-5.1").architecture.index_topk_freq == 1


@pytest.mark.parametrize(
    ("what", "precision", "key", "remedy"),
    [
        ("zai-org/GLM-5-Air", "", "checkpoint", "download it and give its folder"),
        ("glm6", "", "checkpoint", "did you mean 'glm5'?"),
        ("tiny", "", "checkpoint", "posttrain serve model=tiny"),
        ("Qwen/Qwen3-4B", "fp8", "--precision", "finalize_rollout_fp8"),
        ("zai-org/GLM-5-FP8", "nvfp4", "--precision", "finalize_serving"),
    ],
)
def test_what_is_not_known_is_refused(what: str, precision: str, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checkpoint(what, precision)
    (problem,) = refused.value.problems
    assert (problem.key, remedy in problem.remedy) == (key, True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "My-Model"
    made.mkdir()
    (made / "config.json").write_text(transformers_config(TINY, TINY.num_hidden_layers).to_json_string(use_diff=False))
    return made


def test_a_folder_says_itself_what_it_is(folder: Path) -> None:
    found = checkpoint(str(folder))
    assert (found.place, found.name, found.precision, found.is_folder) == (str(folder), "my-model", "bf16", True)
    assert found.architecture == TINY
    content = json.loads((folder / "config.json").read_text())
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": declared}))
    found = checkpoint(str(folder))
    assert (found.precision, found.method) == ("fp8", "compressed-tensors")
    with rejected("precision-not-made", "finalize_serving"):
        checkpoint(str(folder), "nvfp4")


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with rejected("file-missing"):
        checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with rejected("json-invalid"):
        checkpoint(str(tmp_path))


def test_a_run_is_known_by_its_name(tmp_path: Path) -> None:
    paths = begin_run(tmp_path, "mine")
    found = find_checkpoint("mine", "", [CONFIG_DIR], tmp_path)
    assert (found.place, found.precision, found.hardware) == (str(paths.hf_export), "bf16", "cpu")
    assert f"snakemake {paths.hf_export}.receipt.json" in found.missing
    in_fp8 = find_checkpoint("mine", "fp8", [CONFIG_DIR], tmp_path)
    assert Path(in_fp8.place).name.startswith("export_fp8-")
    assert in_fp8.method == "fp8"
    with rejected("precision-not-made", "serving.weights=model", "serving.weights=trained", key="--precision"):
        find_checkpoint("mine", "nvfp4", [CONFIG_DIR], tmp_path)


def test_four_bits_of_a_run_are_those_that_it_makes_of_what_it_trained() -> None:
    words = {"model": "qwen3_30b_a3b", "site": "local", "set": "serving.weights=trained"}
    found = of_run(resolve(words, CONFIG_DIR), "nvfp4")
    assert Path(found.place).name.startswith("export_nvfp4-")
    assert (found.precision, found.method) == ("nvfp4", "modelopt")
    assert f"{Path(found.place).name}.receipt.json" in found.missing


def test_the_quantisation_that_a_run_declares_is_what_sglang_is_told() -> None:
    """Scales of rows are another format than those of blocks, though both are FP8."""
    told = {}
    for strategy in ("block", "channel"):
        words = {"model": "qwen3_4b", "site": "local", "set": f"quantize.strategy={strategy}"}
        found = of_run(resolve(words, CONFIG_DIR), "fp8")
        flags = plan_launch(ServeRequest(), found, machine("h100")).processes[0].flags
        told[strategy] = as_mapping(flags)["--quantization"]
    assert told == {"block": "fp8", "channel": "compressed-tensors"}


def test_names_that_clients_use() -> None:
    assert served_name("zai-org/GLM-5-FP8") == served_name("x/GLM-5-nvfp4-v1") == "glm-5"

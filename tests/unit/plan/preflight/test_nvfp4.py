from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from posttrain.config.load import Resolved
from posttrain.errors import ConfigError
from posttrain.plan.preflight.nvfp4 import check_nvfp4, refuse_unservable
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

CONFIG_DIR = Path(__file__).parents[4] / "config"
NONE = " ".join(f"serving.passes.{name}.num_samples=0" for name in ("coding", "broad", "deep"))


def resolved(model: str = "tiny", changes: str = "", **words: object) -> Resolved:
    return resolve({"model": model, "site": "local", **({"set": changes} if changes else {}), **words}, CONFIG_DIR)


def keys(model: str = "tiny", changes: str = "", **words: object) -> list[str]:
    return [problem.key for problem in check_nvfp4(resolved(model, changes, **words).config)]


@pytest.mark.parametrize("model", ["tiny", "glm5", "glm4.5_air", "qwen3_30b_a3b", "moonlight"])
def test_what_models_with_experts_are_given_by_default_is_right(model: str) -> None:
    assert keys(model) == []


def test_a_dense_model_has_nothing_to_quantise() -> None:
    assert keys("qwen3_4b") == ["serving.format"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (NONE, ["serving.passes"]),
        (f"{NONE} serving.uncalibrated=true", []),
        (f"{NONE} serving.calibration=[a.json]", []),
        ("serving.uncalibrated=true serving.calibration=[a.json]", ["serving.uncalibrated"]),
        ("serving.passes.mine.num_samples=3", ["serving.passes.mine.file"]),
        ("serving.passes.mine.kind=made", ["serving.passes.mine.made"]),
        ("serving.passes.mine.kind=hub serving.passes.mine.repo_id=a/b", ["serving.passes.mine.revision"]),
        ("serving.passes.deep.min_tokens=257", ["serving.passes.deep.min_tokens"]),
        ("serving.passes.deep.min_tokens=256", []),
        ("serving.weights=trained export.checkpoint_folder=x", ["serving.weights"]),
        ("serving.weights=trained", []),
    ],
)
def test_what_is_told_of_a_small_model(changes: str, expected: list[str]) -> None:
    assert keys("tiny", changes) == expected


def test_conversations_that_memory_is_not_planned_for() -> None:
    problems = list(check_nvfp4(resolved("glm5_4layer").config))
    assert [problem.key for problem in problems] == [
        f"serving.passes.{n}.max_tokens" for n in ("coding", "broad", "deep")
    ]
    assert "serving.passes.deep.max_tokens=2048" in problems[-1].remedy


def refusal_of(made: Resolved) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_unservable(Paths(made))
    return str(refused.value)


def test_a_release_in_fp8_is_refused_by_its_name_before_it_is_fetched(tmp_path: Path) -> None:
    store = f"site.store={tmp_path}"
    refuse_unservable(Paths(resolved("glm5", store)))
    told = refusal_of(resolved("glm5", f"{store} model.source.repo_id=zai-org/GLM-5-FP8"))
    assert "zai-org/GLM-5-FP8" in told
    assert "give the BF16 release" in told
    # Other formats than NVFP4 say for themselves what they read.
    refuse_unservable(Paths(resolved("glm5", f"{store} model.source.repo_id=a/b-FP8 serving.format=mxfp8")))


@pytest.mark.parametrize("kind", ["folder", "made"])
def test_quantised_weights_are_refused_by_their_config_where_it_is_there(tmp_path: Path, kind: str) -> None:
    store = f"site.store={tmp_path / 'store'}"
    if kind == "folder":
        made, folder = resolved("tiny", f"{store} model.source.kind=folder model.source.folder={tmp_path}"), tmp_path
    else:
        made = resolved("tiny", store)
        folder = Paths(made).hf
        folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"}))
    refuse_unservable(Paths(made))
    declared = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(declared))
    assert f"{folder}: quantised (fp8)" in refusal_of(made)


def test_a_calibration_that_no_rank_has_room_for() -> None:
    config = resolved("glm5", nodes=16).config
    small = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, memory_gib_per_gpu=20))
    assert [problem.key for problem in check_nvfp4(small)] == ["parallel"]

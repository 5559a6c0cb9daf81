"""The file that an import writes, and which model a script's checkpoint is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posttrain.errors import ConfigError
from posttrain_import.config_file import render
from posttrain_import.importing import Imported, Told
from posttrain_import.model_names import known_models, model_of, plain_name
from posttrain_import.script import Given, Script

CONFIG_DIR = Path(__file__).parents[2] / "config"


def test_values_stand_in_the_schemas_order_with_their_flags() -> None:
    found = Imported(
        {"model": "tiny", "nodes": 2, "hardware": "h200", "site": "local"},
        implied=("site", "nodes"),
        values={
            "optimizer.lr": 1e-6,
            "optimizer.beta2": 0.95,
            "engine.own_nodes": 1,
            "algorithm.loss_aggregation": "token_mean",
            "engine.pd.num_prefill_engines": 2,
        },
        sources={"optimizer.lr": ["--lr 1e-6 (run.sh:3)", "--other"]},
    )
    text = render(found, "run\n.sh")
    assert yaml.safe_load(text) == {
        "model": "tiny",
        "nodes": 2,
        "hardware": "h200",
        "engine": {"own_nodes": 1, "pd": {"num_prefill_engines": 2}},
        "algorithm": {"loss_aggregation": "token_mean"},
        "optimizer": {"lr": 1e-6, "beta2": 0.95},
    }
    head, body = text.split("docs/coming-from.md, what is different here.\n")
    assert head.startswith("# From run\\n.sh, by `posttrain import-flags`.")
    lines = body.splitlines()
    assert "  lr: 1.0e-06  # --lr 1e-6 (run.sh:3); --other" in lines
    assert "  beta2: 0.95" in lines
    assert lines.index("optimizer:") < lines.index("  lr: 1.0e-06  # --lr 1e-6 (run.sh:3); --other")
    assert "\n\nengine:\n" in text, "a section stands apart"
    assert "\n  pd:\n    num_prefill_engines: 2\n" in text
    assert "Not taken over" not in text
    assert text.endswith("\n")


def test_keys_of_the_hardware_stand_beside_its_name() -> None:
    names = {"model": "tiny", "nodes": 1, "hardware": "h200", "site": "local"}
    found = Imported(names, implied=("hardware", "site"), values={"hardware.gpus_per_node": 4})
    assert yaml.safe_load(render(found, "run.sh")) == {
        "model": "tiny",
        "nodes": 1,
        "hardware": {"name": "h200", "gpus_per_node": 4},
    }


def test_what_is_not_taken_over_is_a_comment() -> None:
    missed = [Told("--flag", "1", "run.sh:2", "why"), Told("", "", "", "all of it"), Told("--other", "", "", "")]
    text = render(Imported({"model": "tiny", "nodes": 1}, missed=missed), "run.sh")
    assert text.endswith("\n\n# Not taken over:\n#   --flag 1 (run.sh:2): why\n#   all of it\n#   --other\n")


def named(*values: str) -> Script:
    return Script({"--hf-checkpoint": Given("--hf-checkpoint", values, "run.sh:7")} if values else {}, ())


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("/x/Qwen3-4B", "qwen3_4b"),
        ("/x/Qwen3-4B-FP8/", "qwen3_4b"),
        ("$ROOT/qwen3_4b_torch_dist", "qwen3_4b"),
        ("Moonlight-16B-A3B-Instruct", "moonlight"),
        ("GLM-4.5-Air", "glm4.5_air"),
    ],
)
def test_the_checkpoint_names_a_model(folder: str, model: str) -> None:
    assert model_of(named(folder, "/x/GLM-5"), [CONFIG_DIR]) == model


@pytest.mark.parametrize(
    ("script", "value", "remedy"),
    [
        (named("/x/Qwen3-5B"), "'Qwen3-5B' (run.sh:7)", "beside the script: did you mean 'qwen3.5_4b'?"),
        (named("/x/Zzzzzz"), "'Zzzzzz' (run.sh:7)", "beside the script"),
        (named(), "not given", "beside the script"),
        (named(""), "not given", "beside the script"),
    ],
)
def test_another_one_is_told_with_those_that_are_known(script: Script, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_of(script, [CONFIG_DIR])
    (problem,) = raised.value.problems
    assert problem.value == value
    assert problem.remedy.endswith(remedy)
    assert "glm5, " in problem.allowed
    assert problem.allowed.count("qwen3_4b,") == 1


def test_own_folders_have_models_too(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yaml").write_text("model:\n  source:\n    repo_id: me/My_Model-1.5\n")
    (tmp_path / "models" / "bare.yaml").write_text("trainer: {}\n")
    assert [*known_models([tmp_path])] == [("bare", "bare"), ("mine", "mine"), ("mymodel1.5", "mine")]
    assert model_of(named("/x/my-model-1.5"), [CONFIG_DIR, tmp_path]) == "mine"
    assert plain_name("GLM-5.1_Air") == "glm5.1air"

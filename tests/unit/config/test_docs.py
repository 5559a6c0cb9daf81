import dataclasses
import json
import typing
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from posttrain.config import schema
from posttrain.config.docs import entries, json_schema, render_readme, sections, values_by_layer
from posttrain.config.fields import defaults_of, row_of

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
COMMITTED_SCHEMA = json.loads((CONFIG_DIR / "schema.json").read_text(encoding="utf-8"))
# Lines of it are no files that anything is merged with key by key.
LAYERS = sorted(set(CONFIG_DIR.rglob("*.yaml")) - {CONFIG_DIR / "algorithms.yaml"})


def test_the_committed_reference_is_what_the_schema_says():
    committed = (CONFIG_DIR / "README.md").read_text(encoding="utf-8")
    assert committed == render_readme(CONFIG_DIR), "run: python -m posttrain.config.docs > config/README.md"


def test_every_key_stands_in_it_once():
    text = render_readme(CONFIG_DIR)
    for key in defaults_of(schema.Config):
        assert text.count(f"| `{key}` |") == 1 or key == "nodes", key
    assert "| `nodes` | Nodes of the training job | whole number | the model's `defaults.nodes` | ≥ 1 |" in text


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("optimizer.lr", "| Learning rate | number | `1e-06` in `base.yaml` | > 0, ≤ 1 |"),
        ("trainer.save_interval", "| Steps between checkpoints | whole number | `20` | ≥ 1 |"),
        ("hardware.device", "| Device of the tensors | text | set in `hardware/` | `cuda`, `cpu` |"),
        (
            "algorithm.loss_aggregation",
            "| Denominator of the loss | text | set in `algorithms.yaml` | `constant`, ",
        ),
        (
            "data.seed",
            "| Seed of generation and of the shuffle of each epoch | whole number | set in `models/` | ≥ 0 |",
        ),
    ],
)
def test_rows_tell_meaning_type_origin_and_range(key, row):
    assert f"| `{key}` {row}" in render_readme(CONFIG_DIR)


def test_every_section_and_field_is_described():
    for name, section in sections(schema.Config):
        assert section.__doc__
        hints = typing.get_type_hints(section)
        fields = dataclasses.fields(section)
        leaves = [f for f in fields if not dataclasses.is_dataclass(hints[f.name]) and not row_of(hints[f.name])]
        assert [entry.doc for entry in entries(name, section, {})] == [field.metadata["doc"] for field in leaves]


def test_where_values_come_from(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 0.5}\n")
    (tmp_path / "algorithms.yaml").write_text("one: {clip: dual}\n")
    (tmp_path / "models" / "a.yaml").write_text("optimizer: {lr: 1.0, eps: 1.0}\n")
    assert values_by_layer(tmp_path) == {
        "nodes": "the model's `defaults.nodes`",
        "optimizer.lr": "`0.5` in `base.yaml`",
        "optimizer.eps": "set in `models/`",
        "algorithm.clip": "set in `algorithms.yaml`",
    }


def complaints(content):
    """Return what an editor underlines: the places of the innermost errors."""
    found = []
    for error in Draft7Validator(COMMITTED_SCHEMA).iter_errors(content):
        inner = [child for child in error.context or [error] if child.validator != "type"] or [error]
        found += [".".join(map(str, child.absolute_path)) for child in inner]
    return found


def test_the_committed_schema_is_what_the_schema_says():
    Draft7Validator.check_schema(COMMITTED_SCHEMA)
    assert json.loads(json.dumps(json_schema())) == COMMITTED_SCHEMA, (
        "run: python -m posttrain.config.docs --schema > config/schema.json"
    )


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.relative_to(CONFIG_DIR).as_posix())
def test_an_editor_knows_every_key_and_value_of_a_shipped_file(path):
    first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / first).resolve() == CONFIG_DIR / "schema.json"
    assert complaints(OmegaConf.to_container(OmegaConf.load(path))) == []


def test_every_preset_holds_keys_of_the_algorithm():
    for name, line in OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "algorithms.yaml")).items():
        assert complaints({"algorithm": line}) == [], name


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"optimzer": {"lr": 1e-4}}, ""),
        ({"optimizer": {"Lr": 1e-4}}, "optimizer"),
        ({"optimizer": {"lr": 2.0}}, "optimizer.lr"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr"),
        ({"training": {"num_steps": 4.5}}, "training.num_steps"),
        ({"hardware": {"device": "gpu"}}, "hardware.device"),
        ({"model": {"architecture": {"hidden": 4}}}, "model.architecture"),
        ({"logging": {"wandb_tags": "one"}}, "logging.wandb_tags"),
        ({"run": "1st"}, "run"),
        ({"nodes": 0}, "nodes"),
    ],
)
def test_what_is_mistyped_is_underlined(content, place):
    assert complaints(content) == [place]


def test_a_file_of_ones_own_may_name_files_and_change_them():
    assert complaints({"model": "glm5", "nodes": 24, "site": {"name": "mine"}, "run": "mine", "fork": "old@4"}) == []

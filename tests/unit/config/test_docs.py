import dataclasses
import typing
from pathlib import Path

import pytest

from posttrain.config import schema
from posttrain.config.docs import entries, render_readme, sections, values_by_layer
from posttrain.config.load import schema_defaults

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def test_the_committed_reference_is_what_the_schema_says():
    committed = (CONFIG_DIR / "README.md").read_text(encoding="utf-8")
    assert committed == render_readme(CONFIG_DIR), "run: python -m posttrain.config.docs > config/README.md"


def test_every_key_stands_in_it_once():
    text = render_readme(CONFIG_DIR)
    for key in schema_defaults():
        assert text.count(f"| `{key}` |") == 1 or key == "nodes", key
    assert "| `nodes` | Nodes of the training job | whole number | the model's `defaults.nodes` | ≥ 1 |" in text


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("optimizer.lr", "| Learning rate | number | `1e-06` in `base.yaml` | > 0, ≤ 1 |"),
        ("trainer.save_interval", "| Steps between checkpoints | whole number | `20` | ≥ 1 |"),
        ("hardware.device", "| Where tensors live | text | set in `hardware/` | `cuda`, `cpu` |"),
        (
            "algorithm.loss_aggregation",
            "| Denominator of the loss | text | set in `algorithms.yaml` | `constant`, ",
        ),
        ("data.label_key", '| Column with the label | text | `"label"` |  |'),
    ],
)
def test_rows_tell_meaning_type_origin_and_range(key, row):
    assert f"| `{key}` {row}" in render_readme(CONFIG_DIR)


def test_every_section_and_field_is_described():
    for name, section in sections(schema.Config):
        assert section.__doc__
        hints = typing.get_type_hints(section)
        leaves = [field for field in dataclasses.fields(section) if not dataclasses.is_dataclass(hints[field.name])]
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

"""Every name of another trainer leads to a key that exists, and is none of our own."""

from __future__ import annotations

from posttrain.config import schema
from posttrain.config.fields import leaf_types
from posttrain.config.key_aliases import OTHER_NAMES, key_of


def test_the_keys_exist_and_are_called_otherwise() -> None:
    keys = leaf_types(schema.Config)
    assert set(OTHER_NAMES.values()) <= set(keys)
    for name, key in OTHER_NAMES.items():
        assert key.rpartition(".")[2] != name


def test_a_name_is_known_in_any_section_and_spelling() -> None:
    assert key_of("actor.optim.learning_rate") == key_of("--learning-rate") == "optimizer.lr"
    assert key_of("optimizer.lr") == key_of("learning") == ""

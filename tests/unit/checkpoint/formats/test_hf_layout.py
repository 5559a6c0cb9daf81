import json
import os

import pytest
from tests.support.rejections import rejected
from tests.support.small_checkpoint import ARCHITECTURE, make_small_checkpoint

from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.param_names import expected_tensors

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return make_small_checkpoint(tmp_path / "hf")


def _change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_checkpoint_gives_its_tensors(folder):
    assert set(check_layout(folder).infos) == set(expected_tensors(ARCHITECTURE))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('"hidden_size": 32', "has 'hidden_size' twice"),
        ('"rope_scaling": {"a": 1, "a": 2}', "has 'a' twice"),
        *((f'"rope_theta": {number}', f"holds {number}, which is no") for number in ("NaN", "-Infinity", "1e999")),
        ('"a": ' + "[" * 100_000, "nested too deeply"),
        ('"a": ' + "9" * 5000, "4300 digits"),
    ],
)
def test_what_readers_of_config_json_take_for_different_things(folder, more, told):
    text = (folder / "config.json").read_text().strip()
    (folder / "config.json").write_text(f"{text[:-1].rstrip()}, {more}}}")
    with rejected("json-invalid", "config.json", told) as refused:
        check_layout(folder)
    assert "remedy: correct it" in str(refused.value)


def test_a_truncated_shard_is_named_with_both_sizes(folder):
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, size - 1)
    with rejected("shards-incomplete", SHARD, f"{size - 1} bytes", size):
        check_layout(folder)


def test_a_file_that_the_index_names_and_that_is_absent(folder):
    (folder / SHARD).unlink()
    with rejected("shards-incomplete", SHARD):
        check_layout(folder)


def test_a_tensor_that_is_not_in_the_file_named(folder):
    _change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": SHARD, "lm_head.weight": SHARD}))
    with rejected("index-wrong", SHARD):
        check_layout(folder)


def test_a_tensor_that_the_index_does_not_name_is_not_lost_on_the_way(folder):
    _change_index(folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    with rejected("index-incomplete", "model.norm.weight"):
        check_layout(folder)


def test_an_index_that_names_files_elsewhere(folder):
    _change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "../other.safetensors"}))
    with rejected("name-leaves-folder", "index.json: '../other.safetensors'"):
        check_layout(folder)


@pytest.mark.parametrize(("content", "found"), [("{", "1 bytes"), ("[1]", "list")])
def test_a_broken_config(folder, content, found):
    (folder / "config.json").write_text(content)
    with rejected("json-invalid", "config.json", found):
        check_layout(folder)


def test_a_missing_config(folder):
    (folder / "config.json").unlink()
    with rejected("file-missing", "config.json"):
        check_layout(folder)


def test_read_object(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, null]}')
    assert read_object(tmp_path / "a.json") == {"a": [1, None]}

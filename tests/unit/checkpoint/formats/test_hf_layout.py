import json
import os
import re

import pytest
from tests.support.small_checkpoint import ARCHITECTURE, make_small_checkpoint

from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.errors import CheckpointError

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
    with pytest.raises(CheckpointError, match=rf"config\.json: not JSON \(.*{re.escape(told)}") as refused:
        check_layout(folder)
    assert "remedy: correct it" in str(refused.value)


def test_a_truncated_shard_is_named_with_both_sizes(folder):
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, size - 1)
    with pytest.raises(CheckpointError, match=f"{SHARD}: truncated: {size - 1} bytes on disk, {size} according"):
        check_layout(folder)


def test_a_file_that_the_index_names_and_that_is_absent(folder):
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=SHARD):
        check_layout(folder)


def test_a_tensor_that_is_not_in_the_file_named(folder):
    _change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": SHARD, "lm_head.weight": SHARD}))
    with pytest.raises(CheckpointError, match=rf"(model.norm.weight|lm_head.weight) is not in {SHARD}"):
        check_layout(folder)


def test_a_tensor_that_the_index_does_not_name_is_not_lost_on_the_way(folder):
    _change_index(folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"does not name 1 tensors of its shards:\n  model\.norm\.weight in "):
        check_layout(folder)


def test_an_index_that_names_files_elsewhere(folder):
    _change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "../other.safetensors"}))
    with pytest.raises(
        CheckpointError, match=r"index.json: '../other.safetensors' is not the name of a file inside its folder"
    ):
        check_layout(folder)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not JSON .*, 1 bytes"), ("[1]", "holds a list, expected an object")]
)
def test_a_broken_config(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        check_layout(folder)


def test_a_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: missing; is .* a checkpoint in Hub layout"):
        check_layout(folder)


def test_read_object(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, null]}')
    assert read_object(tmp_path / "a.json") == {"a": [1, None]}

"""Tensors that a checkpoint repeats, and the readings of one whose copies differ."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, TINY_QWEN3, TINY_QWEN3_5, make_random_checkpoint, write_shards

from posttrain.checkpoint.formats.config_patch import PATCH_FILE, read_patch, undo_patch
from posttrain.checkpoint.formats.hf_config import check_config
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.patched_copy import patch_folder
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.tied_copies import check_copies, differing_copies, read_as
from posttrain.checkpoint.param_names import optional_copies
from posttrain.config.schema import Model, Patch
from posttrain.store import Receipt, record_files

UNTIED = dataclasses.replace(TINY_QWEN3, tie_word_embeddings=False)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make(folder, arch=TINY_QWEN3, changes=(), num_shards=3):
    """Write a checkpoint with every copy; those in `changes` differ in their last value."""
    tensors = make_random_checkpoint(folder, arch)
    copies = {copy: tensors[copied].clone() for copy, copied in optional_copies(arch).items()}
    for name in changes:
        copies[name][-1, -1] += 1
    write_shards(folder, tensors | copies, num_shards)
    return CheckpointReader(folder)


def problems(reader, config, arch=TINY_QWEN3, choice="reject"):
    differing = differing_copies(config, arch, reader)
    return list(check_copies(config, arch, reader, differing, choice))


@pytest.mark.parametrize("arch", [TINY_QWEN3, TINY])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_copies_that_are_equal_are_no_problem(tmp_path, arch, num_shards):
    reader = make(tmp_path, arch, num_shards=num_shards)
    assert problems(reader, {"tie_word_embeddings": arch.tie_word_embeddings}, arch) == []


def test_a_tied_head_that_differs_is_rejected_with_a_key_for_each_reading(tmp_path):
    (found,) = problems(make(tmp_path, changes=[HEAD]), {"tie_word_embeddings": True})
    assert (found.key, EMBEDDING in found.value) == (HEAD, True)
    assert "transformers 5 does not tie it" in found.remedy
    assert "model.patch.copies=keep and model.architecture.tie_word_embeddings=false" in found.remedy
    assert "model.patch.copies=drop" in found.remedy


def test_it_differs_too_where_only_the_source_ties(tmp_path):
    """Who set the architecture to untied, and left the choice of a reading out."""
    reader = make(tmp_path, changes=[HEAD])
    assert [found.key for found in problems(reader, {"tie_word_embeddings": True}, UNTIED)] == [HEAD]
    assert problems(reader, {"tie_word_embeddings": False}, UNTIED) == []
    assert problems(reader, {}, UNTIED) == [], "no family of ours ties by default"


@pytest.mark.parametrize("copy", optional_copies(TINY))
def test_a_copy_in_an_mtp_layer_that_differs_is_rejected(tmp_path, copy):
    reader = make(tmp_path, TINY, changes=[copy])
    (found,) = problems(reader, {}, TINY)
    assert found.key == copy
    assert optional_copies(TINY)[copy] in found.value
    assert "model.patch.copies=keep" in found.remedy
    assert "model.patch.copies=drop" in found.remedy
    assert problems(reader, {}, TINY, "keep") == problems(reader, {}, TINY, "drop") == []


def test_a_missing_head_has_two_readings_as_well(tmp_path):
    make_random_checkpoint(tmp_path, TINY_QWEN3)
    reader = CheckpointReader(tmp_path)
    for config in ({}, {"tie_word_embeddings": None}, {"tie_word_embeddings": False}):
        (found,) = problems(reader, config, UNTIED)
        assert "random numbers" in found.remedy
        assert "tie_word_embeddings: true" in found.remedy
    assert problems(reader, {"tie_word_embeddings": True}) == []


def test_a_nested_flag_that_says_otherwise_is_rejected(tmp_path):
    reader = make(tmp_path)
    (found,) = problems(reader, {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}})
    assert found.key == "config.json: text_config.tie_word_embeddings"
    assert problems(reader, {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}) == []


def test_what_is_kept_is_not_tied(tmp_path):
    config, differing = {"tie_word_embeddings": True, "a": 1}, {HEAD: EMBEDDING}
    assert read_as(config, differing, "keep") == {"tie_word_embeddings": False, "a": 1}
    assert read_as(config, differing, "drop") == read_as(config, {}, "keep") == config
    reader = make(tmp_path, changes=[HEAD])
    (found,) = problems(reader, config, TINY_QWEN3, "keep")
    assert "tie_word_embeddings=false" in found.remedy
    assert problems(reader, config, UNTIED, "keep") == []


def drop(source, destination, names):
    """Make the patched copy without some tensors; returns the files that are not linked."""
    model = Model("small", architecture=TINY_QWEN3, patch=Patch("native"))
    files = patch_folder(source, destination, model, Receipt("", record_files(source), {}, {}), dropped=names)
    linked = [f.path for f in files if (source / f.path).exists() and (source / f.path).samefile(destination / f.path)]
    return {str(file.path) for file in files} - {*linked}


@pytest.mark.parametrize("num_shards", [1, 4])
def test_shards_are_written_without_what_is_dropped(tmp_path, num_shards):
    reader = make(tmp_path / "hf", changes=[HEAD], num_shards=num_shards)
    written = drop(tmp_path / "hf", tmp_path / "other", [HEAD])
    assert written - {"model.safetensors.index.json", PATCH_FILE} == {reader.file_of(HEAD)}
    left = check_layout(tmp_path / "other")
    assert left.names == [name for name in reader.names if name != HEAD]
    assert all(torch.equal(left.tensor(name), reader.tensor(name)) for name in left)
    (change,) = read_patch(tmp_path / "other")[reader.file_of(HEAD)]
    assert (change.path, change.new) == (HEAD, "left out")
    if num_shards > 1:
        size = json.loads((tmp_path / "other/model.safetensors.index.json").read_text())["metadata"]["total_size"]
        assert size == reader.total_bytes - reader.info(HEAD).size_bytes


def test_a_shard_of_nothing_but_copies_is_left_out(tmp_path):
    tensors = make_random_checkpoint(tmp_path / "hf", TINY_QWEN3)
    shards = {"a.safetensors": tensors, "b.safetensors": {HEAD: tensors[EMBEDDING] + 1}}
    for path in (tmp_path / "hf").glob("model*.safetensors*"):
        path.unlink()
    for name, held in shards.items():
        save_file(held, tmp_path / "hf" / name)
    weight_map = {tensor: name for name, held in shards.items() for tensor in held}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert drop(tmp_path / "hf", tmp_path / "out", [HEAD]) == {"model.safetensors.index.json", PATCH_FILE}
    assert not (tmp_path / "out/b.safetensors").exists()
    with rejected("only-copies"):
        drop(tmp_path / "hf", tmp_path / "none", list(weight_map))


def test_a_kept_output_matrix_unties_each_section_of_the_config(tmp_path):
    """Of a model with a vision tower; the change is recorded, and taken back."""
    reader = make(tmp_path / "hf", TINY_QWEN3_5, changes=[HEAD])
    config = read_object(tmp_path / "hf" / "config.json")
    (found,) = problems(reader, config, TINY_QWEN3_5)
    assert (found.key, "model.language_model.embed_tokens.weight" in found.value) == (HEAD, True)
    untied = dataclasses.replace(TINY_QWEN3_5, tie_word_embeddings=False)
    assert problems(reader, config, untied, "keep") == []
    model = Model("m", architecture=untied, patch=Patch("native", "keep"))
    receipt = Receipt("", record_files(tmp_path / "hf"), {}, {})
    patch_folder(tmp_path / "hf", tmp_path / "out", model, receipt, unties=True)
    written = read_object(tmp_path / "out" / "config.json")
    assert check_config(written, untied, check_layout(tmp_path / "out").infos) == []
    undo_patch(tmp_path / "out")
    assert read_object(tmp_path / "out" / "config.json") == config


def test_a_tie_that_a_section_contradicts_is_rejected(tmp_path):
    reader = make(tmp_path / "hf", TINY_QWEN3_5)
    config = read_object(tmp_path / "hf" / "config.json")
    config["text_config"]["tie_word_embeddings"] = False
    (found,) = problems(reader, config, TINY_QWEN3_5)
    assert (found.code, found.key) == ("tie-contradicts", "config.json: text_config.tie_word_embeddings")

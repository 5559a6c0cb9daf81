"""An export is what was trained, or the check says why not: each copy is broken once."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import (
    TINY,
    TINY_QWEN3,
    TINY_QWEN3_5,
    TINY_QWEN3_5_MOE,
    make_random_checkpoint,
    write_shards,
)

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.param_names import optional_copies
from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt, write_reference_logprobs
from posttrain.config.families import family_of
from posttrain.config.schema import Model, Patch, Source
from posttrain.errors import ConfigError
from posttrain.rl.evaluation.export_check import check_export, in_words
from posttrain.rl.evaluation.layerwise import logprobs_whole

PAIRS = [((5, 9, 33, 12), (60, 2, 8, 40, 17, 3)), ((7,), (7,))]
WAYS = ("whole", "layers")


def model_of(arch, copies="reject"):
    return Model("m", Source("folder"), arch, Patch("native", copies))


@pytest.fixture(
    params=[TINY, TINY_QWEN3, TINY_QWEN3_5, TINY_QWEN3_5_MOE], ids=["mtp", "tied", "tower-tied", "tower-experts"]
)
def exported(request, tmp_path):
    """An export with all copies written out, and what its trainer said."""
    arch = request.param
    tensors = make_random_checkpoint(tmp_path, arch)
    copies = {copy: tensors[copied].clone() for copy, copied in optional_copies(arch).items()}
    write_shards(tmp_path, tensors | copies, 2)
    layers = range(arch.num_hidden_layers, arch.num_hidden_layers + arch.num_nextn_predict_layers)
    answers, _ = logprobs_whole(tmp_path, PAIRS, layers)
    prompts = [ReferencePrompt([], None, *pair, answer) for pair, answer in zip(PAIRS, answers, strict=True)]
    write_reference_logprobs(tmp_path, ReferenceLogprobs("fp32", {}, prompts))
    return tmp_path, arch


def edit(folder, name, change):
    shard = folder / CheckpointReader(folder).file_of(name)
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize("way", WAYS)
def test_what_was_trained_passes(exported, way):
    folder, arch = exported
    found = check_export(folder, model_of(arch), way)
    assert (found["check"], found["canary"]["num_tokens"]) == (way, 7)
    assert found["canary"]["difference"] < 1e-6
    assert "nats from the trainer's in the mean of 7 tokens (at most 0.05)" in in_words(found)


def test_each_stale_copy_fails_however_little_it_differs(exported):
    folder, arch = exported
    for copy in optional_copies(arch):
        # What one update changes: far below any bound on log-probabilities, and an MTP layer has no share in those.
        edit(folder, copy, lambda tensor: tensor * 1.01)
        with rejected("copy-differs", optional_copies(arch)[copy], key=f"{folder}: {copy}"):
            check_export(folder, model_of(arch), "whole")
        edit(folder, copy, lambda _, name=copy: tensor_of(folder, optional_copies(arch)[name]))
    check_export(folder, model_of(arch), "whole")


def tensor_of(folder, name):
    return CheckpointReader(folder).tensor(name).clone()


def test_what_an_mtp_layer_has_of_its_own_may_be_kept(tmp_path, exported):
    folder, arch = exported
    for copy in optional_copies(arch):
        edit(folder, copy, lambda tensor: tensor * 1.01)
    if arch.tie_word_embeddings:
        with rejected("copy-differs", key=f"{folder}: lm_head.weight"):
            check_export(folder, model_of(arch, "keep"), "whole")
    else:
        check_export(folder, model_of(arch, "keep"), "whole")


@pytest.mark.parametrize("way", WAYS)
def test_other_weights_fail_by_what_they_say(exported, way):
    folder, arch = exported
    # The weight of a norm around 1 is its distance from it.
    edit(folder, f"{family_of(arch).text_prefix}norm.weight", lambda tensor: torch.full_like(tensor, 4.0))
    with pytest.raises(ConfigError) as error:
        check_export(folder, model_of(arch), way)
    assert "nats from the trainer's (fp32) in the mean of 7 tokens" in str(error.value)
    assert "at most 0.05 nats" in str(error.value)


def test_a_config_that_makes_another_model_of_the_same_tensors_fails(exported):
    folder, arch = exported
    config = folder / "config.json"
    content = json.loads(config.read_text())
    content.get("text_config", content)["rms_norm_eps"] = 10.0
    config.write_text(json.dumps(content))
    with rejected("logprobs-differ"):
        check_export(folder, model_of(arch), "whole")


@pytest.mark.parametrize("way", WAYS)
def test_without_a_canary_it_is_loaded_and_that_is_said(exported, way):
    folder, arch = exported
    (folder / "posttrain_canary.json").unlink()
    found = check_export(folder, model_of(arch), way)
    assert found["canary"] is None
    assert "no recorded log-probabilities of the trainer" in in_words(found)
    other = dataclasses.replace(arch, num_nextn_predict_layers=0)
    if arch.num_nextn_predict_layers:
        with rejected("tensors-not-loaded"):
            check_export(folder, model_of(other), way)


def test_a_check_that_is_off_says_so():
    assert in_words({"check": "off"}) == "not checked (export.check=off)"

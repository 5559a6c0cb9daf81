"""transformers' own loading of a checkpoint, whole and a layer at a time."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny_checkpoint import ALL, QWEN3_5, TINY, TINY_QWEN3, TINY_QWEN3_5, make_random_checkpoint

from posttrain.checkpoint.formats.config_patch import Change, apply_changes, write_patched
from posttrain.checkpoint.formats.hf_config import ALIAS_CLASS, ALIAS_TYPE
from posttrain.rl.evaluation import layerwise
from posttrain.rl.evaluation.layerwise import logprobs_by_layer, logprobs_whole

# As many sequences as layers, of one token and of more than an indexer keeps.
PAIRS = [((5, 9, 33, 12), (60, 2, 8, 40, 17, 3, 21, 22)), ((7,), (7,)), ((50, 4, 4, 19, 30, 31, 2, 6), (41, 1, 9))]
WAYS = [logprobs_whole, logprobs_by_layer]
# One with all parts of the architecture, one without any of them; the others in `make test-faults`.
FAST = ("glm_moe_dsa_sharing", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
ARCHITECTURES = {**ALL, **QWEN3_5}


def mtp_layers(arch):
    return range(arch.num_hidden_layers, arch.num_hidden_layers + arch.num_nextn_predict_layers)


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.faults("slow")) for name in ARCHITECTURES]
)
def test_both_ways_give_the_same_numbers(tmp_path, family):
    arch = ARCHITECTURES[family]
    make_random_checkpoint(tmp_path, arch)
    whole, loading = logprobs_whole(tmp_path, PAIRS, mtp_layers(arch))
    layered, also = logprobs_by_layer(tmp_path, PAIRS, mtp_layers(arch))
    assert loading.lines() == also.lines() == []
    assert [len(row) for row in whole] == [8, 1, 3]
    for one, other in zip(whole, layered, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert all(-30 < value < 0 for row in whole for value in row)


def test_they_are_log_probabilities(tmp_path):
    """Against logits of the model that transformers makes by its own `from_pretrained`, one token at a time."""
    from transformers import AutoModelForCausalLM

    make_random_checkpoint(tmp_path, TINY_QWEN3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt, response = PAIRS[0]
    expected = []
    for place, token in enumerate(response):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response[:place]]])).logits[0, -1]
        expected.append(logits.log_softmax(-1)[token].item())
    (found,), _ = logprobs_by_layer(tmp_path, [PAIRS[0]], [])
    assert found == pytest.approx(expected, abs=1e-5)


def change(folder, edit):
    """Let `edit` change the tensors of a checkpoint of one shard."""
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        content = json.loads(index.read_text())
        index.write_text(json.dumps({**content, "weight_map": dict.fromkeys(tensors, shard.name)}))


NORM, EXPERT = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.1.up_proj.weight"


def lose(name):
    return lambda tensors: tensors.pop(name)


def widen(name):
    return lambda tensors: tensors.update({name: torch.cat([tensors[name], tensors[name]])})


BROKEN = {
    "a norm is lost": (lose(NORM), NORM, "missing"),
    "the head is lost": (lose("lm_head.weight"), "lm_head.weight", "missing"),
    "a router's bias is lost": (lose("model.layers.1.mlp.gate.e_score_correction_bias"), "e_score", "missing"),
    "a stranger": (lambda tensors: tensors.update({"model.x": torch.ones(2)}), "model.x", "unexpected"),
    "a stranger in a layer": (lambda t: t.update({f"{NORM}2": torch.ones(2)}), f"{NORM}2", "unexpected"),
    "a wider norm": (widen(NORM), NORM, "another shape"),
}


VISION, MTP = "model.visual.blocks.1.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight"
A_LOG = "model.language_model.layers.2.linear_attn.A_log"
BROKEN_TOWER = {
    "a matrix of the vision tower is lost": (lose(VISION), VISION, "missing"),
    "a stranger in the vision tower": (lambda t: t.update({f"{VISION}2": torch.ones(2)}), f"{VISION}2", "unexpected"),
    "a decay is lost": (lose(A_LOG), A_LOG, "missing"),
    "more decays than heads": (widen(A_LOG), A_LOG, "another shape"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BROKEN_TOWER)
def test_what_is_not_loaded_of_a_model_with_a_vision_tower_is_told(tmp_path, way, case):
    edit, name, kind = BROKEN_TOWER[case]
    make_random_checkpoint(tmp_path, TINY_QWEN3_5, num_shards=1)
    change(tmp_path, edit)
    answers, loading = way(tmp_path, PAIRS, mtp_layers(TINY_QWEN3_5))
    assert answers == []
    assert any(name in line and kind in line for line in loading.lines()), loading.lines()


@pytest.mark.parametrize("way", WAYS)
def test_mtp_tensors_with_names_of_their_own_are_strangers_to_a_model_without(tmp_path, way):
    make_random_checkpoint(tmp_path, TINY_QWEN3_5)
    assert MTP in way(tmp_path, [], [])[1].unexpected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_loaded_as_it_is_is_told(tmp_path, way, case):
    edit, name, kind = BROKEN[case]
    make_random_checkpoint(tmp_path, TINY, num_shards=1)
    change(tmp_path, edit)
    for pairs in ([], PAIRS):
        answers, loading = way(tmp_path, pairs, mtp_layers(TINY))
        assert answers == []
        assert any(name in line and kind in line for line in loading.lines()), loading.lines()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_asked_of_a_whole_checkpoint_without_prompts(tmp_path, way):
    make_random_checkpoint(tmp_path, TINY)
    answers, loading = way(tmp_path, [], mtp_layers(TINY))
    assert (answers, loading.lines()) == ([], [])
    assert way(tmp_path, [], [])[1].unexpected, "the MTP layer, where nobody says that it is one"


def test_an_alias_is_read_as_the_model_that_it_stands_for(tmp_path):
    """As the indexer of the alias's own family turns queries, the numbers would be others."""
    make_random_checkpoint(tmp_path, TINY)
    expected, _ = logprobs_whole(tmp_path, PAIRS, mtp_layers(TINY))
    kind = Change("replace", "/model_type", "glm_moe_dsa", ALIAS_TYPE)
    classes = Change("replace", "/architectures", ["GlmMoeDsaForCausalLM"], [ALIAS_CLASS])
    content = json.loads((tmp_path / "config.json").read_text())
    patched = apply_changes(content, [kind, classes], "config.json")
    write_patched(tmp_path, {"config.json": patched}, {"config.json": [kind, classes]})
    for way in WAYS:
        assert way(tmp_path, PAIRS, mtp_layers(TINY))[0] == expected


@pytest.mark.timeout(60)
def test_a_sequence_that_fails_ends_the_others(tmp_path):
    make_random_checkpoint(tmp_path, TINY_QWEN3)
    with pytest.raises(IndexError):
        logprobs_by_layer(tmp_path, [*PAIRS, ((64,), (1,))], [])


def test_one_layer_is_in_memory_at_a_time(tmp_path, monkeypatch):
    arch = dataclasses.replace(TINY_QWEN3, num_hidden_layers=4)
    make_random_checkpoint(tmp_path, arch)
    seen = []
    original = layerwise._LayeredModel._load_layer

    def load_layer(self, prefix):
        original(self, prefix)
        there = [any(not weight.is_meta for weight in layer.parameters()) for layer in self._layers.values()]
        seen.append(there)

    monkeypatch.setattr(layerwise._LayeredModel, "_load_layer", load_layer)
    logprobs_by_layer(tmp_path, PAIRS, [])
    assert seen == [[place == number for place in range(4)] for number in range(4)]

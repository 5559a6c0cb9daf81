import dataclasses
import json

import pytest
from tests.support.small_checkpoint import (
    ARCHITECTURE,
    config_of,
)
from tests.support.tiny_checkpoint import (
    ALL,
    TINY,
    TINY_DEEPSEEK,
    TINY_SHARING,
    TINY_V32,
    TINY_YARN,
    make_random_checkpoint,
)
from transformers import DeepseekV3Config, GlmMoeDsaConfig

from posttrain.checkpoint.formats import as_transformers
from posttrain.checkpoint.formats.hf_config import check_config
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.safetensors_io import TensorInfo
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.config.families import dimensions

CONFIG = config_of(ARCHITECTURE)
TENSORS = {
    name: TensorInfo(name, spec.dtype, spec.shape, 0, spec.size_bytes)
    for name, spec in expected_tensors(ARCHITECTURE).items()
}
DIMENSIONS = [name for name in dimensions(ARCHITECTURE) if name not in ("model_type", "rope_theta")]


def _check(config, tensors=TENSORS, architecture=ARCHITECTURE, **options):
    return {problem.key: problem for problem in check_config(config, architecture, tensors, **options)}


# ---- the check ----


def test_the_model_described_has_no_problems():
    assert _check(CONFIG) == {}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_each_wrong_dimension_is_found_with_both_values(name):
    value = CONFIG[name] + 1
    problem = _check(CONFIG | {name: value})[f"config.json: {name}"]
    assert problem.value == repr(value)
    assert problem.allowed == f"{CONFIG[name]!r} (model.architecture)"


@pytest.mark.parametrize("name", DIMENSIONS)
def test_each_absent_dimension_is_found(name):
    found = _check({key: value for key, value in CONFIG.items() if key != name})
    assert found[f"config.json: {name}"].value == "(missing)"


def test_all_wrong_dimensions_are_found_at_once():
    found = _check(CONFIG | {name: CONFIG[name] + 1 for name in DIMENSIONS})
    assert set(found) >= {f"config.json: {name}" for name in DIMENSIONS}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", value) for value in (10**9, -5, "3", 3.0, [3], {"a": 1}, None)),
        *(("num_labels", value) for value in (10**9, "2", [2], 2.5)),
        *(("n_routed_experts", 10**9), ("num_local_experts", 10**9), ("num_nextn_predict_layers", 10**9)),
        *(("vocab_size", 10**30), ("hidden_size", 10**300), ("rope_scaling", 5), ("rope_parameters", "x")),
        *(("eos_token_id", value) for value in (10**20, "x", {"a": 1}, [["a"]], [1, 64])),
        *(("attn_implementation", "a/b"), ("_attn_implementation", {"": "a/b"}), ("experts_implementation", "a/b")),
        *((key, {"hidden_size": "x"}) for key in ("attribute_map", "sub_configs", "to_dict", "__class__", "validate")),
        *(("architectures", 5), ("layer_types", "x"), ("id2label", [1]), ("use_cache", "x"), ("pad_token_id", 64)),
    ],
)
def test_hostile_values_are_problems_of_their_keys(monkeypatch, key, value):
    """What is known to be wrong is not given to transformers, which would make lists of that length."""
    seen, values = [], as_transformers._values
    monkeypatch.setattr(as_transformers, "_values", lambda config, arch: seen.append(config) or values(config, arch))
    found = _check(CONFIG | {key: value})
    spelled = "n_routed_experts" if key == "num_local_experts" else "rope_theta" if key.startswith("rope") else key
    assert f"config.json: {spelled}" in found or "config.json" in found
    assert all("remedy" in str(problem) for problem in found.values())
    if isinstance(value, int) and value >= 10**9 and key in ("num_hidden_layers", "num_labels", "n_routed_experts"):
        assert all(config.get(key) != value for config in seen)


@pytest.mark.parametrize("key", ["attribute_map", "sub_configs", "to_dict", "__class__", "validate"])
def test_a_key_that_would_replace_a_part_of_transformers_class_is_not_read(monkeypatch, key):
    seen, values = [], as_transformers._values
    monkeypatch.setattr(as_transformers, "_values", lambda config, arch: seen.append(config) or values(config, arch))
    assert list(_check(CONFIG | {key: {"hidden_size": "x"}})) == [f"config.json: {key}"]
    assert seen
    assert all(key not in config for config in seen)


@pytest.mark.parametrize("key", ["text_config", "decoder", "generator"])
def test_a_configuration_inside_the_configuration_is_not_read(monkeypatch, key):
    monkeypatch.setattr(as_transformers, "_values", lambda *_: pytest.fail("it was read"))
    assert list(_check(CONFIG | {key: {"hidden_size": 8}})) == [f"config.json: {key}"]


def test_a_file_of_too_many_keys_is_not_given_to_transformers(monkeypatch):
    monkeypatch.setattr(as_transformers, "_values", lambda *_: pytest.fail("it was read"))
    assert _check(CONFIG | {f"k{i}": i for i in range(1000)})["config.json"].allowed == "at most 1,000"


@pytest.mark.parametrize("more", [{"attn_implementation": "sdpa"}, {"num_labels": 2}, {"pad_token_id": None}])
def test_what_published_files_say_beside_the_model_is_accepted(more):
    assert _check(CONFIG | more) == {}


def test_a_truth_value_is_no_number():
    assert "config.json: n_shared_experts" in _check(CONFIG | {"n_shared_experts": True})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"rope_parameters": None, "rope_theta": 10000.0},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},
        {"rope_theta": 10000},
    ],
)
def test_both_spellings_of_rope_are_accepted(rope):
    assert _check(CONFIG | rope) == {}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": 1e6}, "rope_theta"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": {"a": 1}}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": [1e4]}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, "rope_type"),
    ],
)
def test_another_rope_is_found(rope, key):
    assert list(_check(CONFIG | rope)) == [f"config.json: {key}"]


@pytest.mark.parametrize(
    ("change", "key", "code", "datum"),
    [
        ({"model_type": "glm4_moe"}, "model_type", "architecture-differs", "'glm_moe_dsa'"),
        ({"architectures": ["GlmMoeDsaModel"]}, "architectures", "architecture-differs", "GlmMoeDsaForCausalLM"),
        ({"model_type": "deepseek_v32"}, "model_type", "already-patched", ""),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "model_type", "already-patched", ""),
        ({"dtype": "float32"}, "dtype", "dtype-not-bf16", "'bfloat16'"),
        ({"dtype": None}, "dtype", "dtype-not-bf16", "'bfloat16'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "already-quantized", "fp8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "model-variant", ""),
        ({"n_group": 8}, "n_group", "model-variant", ""),
        ({"scoring_func": "softmax"}, "scoring_func", "model-variant", ""),
        ({"num_key_value_heads": 1}, "num_key_value_heads", "model-variant", ""),
        ({"indexer_types": ["full", "shared", "full"]}, "indexer_types", "indexers-differ", "['full', 'full', 'full']"),
        ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types", "model-variant", ""),
        ({"norm_topk_prob": None}, "norm_topk_prob", "model-variant", "None"),
        ({"norm_topk_prob": False}, "norm_topk_prob", "model-variant", ""),
        ({"rope_interleave": None}, "rope_interleave", "model-variant", ""),
        ({"index_topk_freq": 2}, "index_topk_freq", "architecture-differs", "1 (model.architecture)"),
        ({"index_topk_pattern": "FSF"}, "index_topk_pattern", "indexers-differ", "'FFF'"),
    ],
)
def test_what_the_checkpoint_must_not_be(change, key, code, datum):
    found = _check(CONFIG | change)
    assert list(found) == [f"config.json: {key}"]
    (problem,) = found.values()
    assert problem.code == code
    assert datum in str(problem)


@pytest.mark.parametrize("freq", [None, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("pattern", [None, "FFF", "FFS", ["full"] * 3, ["full", "shared", "full"]])
def test_layers_that_share_their_choice_are_refused_however_it_is_said(freq, offset, pattern):
    """Where transformers would share a top-k. A frequency that shares none of so few layers is refused, too."""
    said = {"index_topk_freq": freq, "index_topk_pattern": pattern, "index_skip_topk_offset": offset}
    said = {key: value for key, value in said.items() if value is not None}
    shares = "shared" in GlmMoeDsaConfig(num_hidden_layers=3, **said).indexer_types
    found = _check(CONFIG | {"indexer_types": None} | said)
    assert set(found) <= {"config.json: index_topk_freq", "config.json: index_topk_pattern"}
    assert bool(found) == (shares or freq in (2, 3, 4))


@pytest.mark.parametrize(
    "key", ["tie_word_embeddings", "attention_bias", "mlp_layer_types", "indexer_types", "n_group"]
)
def test_null_is_what_the_family_does_by_itself(key):
    assert _check(CONFIG | {key: None}) == {}


def test_the_older_name_of_dtype():
    config = {key: value for key, value in CONFIG.items() if key != "dtype"}
    assert _check(config | {"torch_dtype": "bfloat16"}) == {}


def test_missing_wrong_and_unknown_tensors_are_named_at_once():
    tensors = {name: info for name, info in TENSORS.items() if name != "model.norm.weight"}
    wide = "model.layers.1.mlp.experts.0.up_proj.weight"
    router = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[wide] = TensorInfo(wide, "BF16", (17, 32), 0, 0)
    tensors[router] = TensorInfo(router, "BF16", (4,), 0, 0)
    tensors["model.extra"] = TensorInfo("model.extra", "BF16", (1,), 0, 0)
    value = _check(CONFIG, tensors)["tensors"].value
    assert value.startswith("4 are not")
    for line in (
        "model.norm.weight: missing, expected BF16 [32]",
        f"{wide}: BF16 [17, 32], expected BF16 [16, 32]",
        f"{router}: BF16 [4], expected F32 [4]",
        "model.extra: unknown",
    ):
        assert line in value


def test_many_wrong_tensors_are_counted():
    value = _check(CONFIG, {})["tensors"].value
    assert value.startswith(f"{len(TENSORS)} are not")
    assert value.endswith(f"and {len(TENSORS) - 20} more")


def test_optional_copies_in_the_mtp_layer_are_accepted():
    copies = {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }
    assert _check(CONFIG, TENSORS | {copy: TENSORS[original] for copy, original in copies.items()}) == {}


def test_what_transformers_writes_is_accepted():
    """The config as `save_pretrained` writes it, with its own names for rope and layer types."""
    fields = dimensions(ARCHITECTURE) | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    del fields["model_type"], fields["rope_theta"]
    written = GlmMoeDsaConfig(**fields, num_key_value_heads=2, dtype="bfloat16").to_dict()
    assert _check(json.loads(json.dumps(written)) | {"architectures": ["GlmMoeDsaForCausalLM"]}) == {}


def test_a_model_without_indexer_need_not_mention_it():
    architecture = dataclasses.replace(
        ARCHITECTURE, model_type="deepseek_v3", index_n_heads=0, index_head_dim=0, index_topk=0
    )
    fields = dimensions(architecture) | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    del fields["model_type"], fields["rope_theta"]
    written = DeepseekV3Config(**fields, num_key_value_heads=2, n_group=1, topk_group=1, dtype="bfloat16").to_dict()
    config = json.loads(json.dumps(written)) | {"architectures": ["DeepseekV3ForCausalLM"]}
    tensors = {
        name: TensorInfo(name, spec.dtype, spec.shape, 0, 0) for name, spec in expected_tensors(architecture).items()
    }
    assert _check(config, tensors, architecture) == {}


@pytest.mark.parametrize("architecture", ALL.values(), ids=ALL)
def test_a_checkpoint_with_the_tensors_of_transformers_is_accepted(tmp_path, architecture):
    make_random_checkpoint(tmp_path / "hf", architecture)
    tensors = check_layout(tmp_path / "hf").infos
    assert _check(read_object(tmp_path / "hf" / "config.json"), tensors, architecture) == {}


def _written(tmp_path, architecture):
    make_random_checkpoint(tmp_path / "hf", architecture)
    return read_object(tmp_path / "hf" / "config.json"), check_layout(tmp_path / "hf").infos


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, []),
        ({"factor": 4.0}, ["rope_scaling.factor"]),
        ({"original_max_position_embeddings": 64}, ["rope_scaling.original_max_position_embeddings"]),
        ({"beta_fast": None, "beta_slow": None}, []),
        ({"mscale": None}, ["rope_parameters.mscale"]),
        ({"beta_fast": 16}, ["rope_scaling.beta_fast"]),
        ({"mscale_all_dim": None}, ["rope_scaling.mscale_all_dim"]),
        ({"mscale_all_dim": 0.707, "mscale": 0.707}, ["rope_scaling.mscale", "rope_scaling.mscale_all_dim"]),
        ({"attention_factor": 1.2}, ["rope_scaling.attention_factor"]),
        ({"truncate": False}, ["rope_scaling.truncate"]),
        ({"rope_type": "linear"}, ["rope_type"]),
        ({"rope_type": "default"}, ["rope_type"]),
    ],
)
@pytest.mark.parametrize("spelled", ["rope_parameters", "rope_scaling"])
def test_scaled_positions_are_compared_number_by_number(tmp_path, change, keys, spelled):
    config, tensors = _written(tmp_path, TINY_YARN)
    rope = config.pop("rope_parameters") | change
    if spelled == "rope_scaling":
        rope["type"] = rope.pop("rope_type")
        config["rope_theta"] = rope.pop("rope_theta")
    found = _check(config | {spelled: rope}, tensors, TINY_YARN)
    assert list(found) == [f"config.json: {key}" for key in keys]


def test_groups_of_experts_are_compared(tmp_path):
    config, tensors = _written(tmp_path, TINY_YARN)
    assert set(_check(config | {"n_group": 2, "topk_group": 1}, tensors, TINY_YARN)) == {
        "config.json: n_group",
        "config.json: topk_group",
    }
    plain, tensors = _written(tmp_path / "plain", TINY_DEEPSEEK)
    assert set(_check(plain | {"n_group": 2}, tensors, TINY_DEEPSEEK)) == {"config.json: n_group"}


def test_a_deepseek_v32_is_itself_where_it_is_described_and_the_alias_elsewhere(tmp_path):
    config, tensors = _written(tmp_path, TINY_V32)
    assert _check(config, tensors, TINY_V32) == {}
    assert list(_check(config | {"indexer_rope_interleave": True}, tensors, TINY_V32)) == [
        "config.json: indexer_rope_interleave"
    ]
    assert _check(config, tensors, TINY)["config.json: model_type"].code == "already-patched"


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, []),
        ({"indexer_types": None, "index_topk_pattern": "FSFS"}, []),
        ({"indexer_types": None, "index_topk_pattern": "FSSS"}, ["index_topk_pattern"]),
        ({"indexer_types": ["full"] * 4}, ["indexer_types"]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, ["index_topk_freq"]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, ["index_skip_topk_offset"]),
        ({"indexer_types": None}, ["index_topk_freq", "index_skip_topk_offset"]),
    ],
)
def test_which_layers_share_their_choice_is_compared_however_it_is_said(tmp_path, said, keys):
    config, tensors = _written(tmp_path, TINY_SHARING)
    without = {key: value for key, value in config.items() if key not in ("index_topk_freq", "index_skip_topk_offset")}
    found = _check(without | said, tensors, TINY_SHARING)
    assert list(found) == [f"config.json: {key}" for key in keys]

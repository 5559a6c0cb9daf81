import dataclasses
import json

import pytest
from tests.support.small_checkpoint import (
    ARCHITECTURE,
    SPECIAL_TOKENS,
    config_of,
    make_small_checkpoint,
    tokenizer_config,
    write_object,
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
from transformers import AutoTokenizer, DeepseekV3Config, GlmMoeDsaConfig

from posttrain.artifacts import Receipt, hash_file, record_files
from posttrain.checkpoint.formats import hf_config
from posttrain.checkpoint.formats.config_patch import PATCH_FILE, undo_patch
from posttrain.checkpoint.formats.hf_config import check_config, patch_folder
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.safetensors_io import TensorInfo
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.staging import file_placement
from posttrain.config.families import dimensions
from posttrain.errors import CheckpointError

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
    ("change", "key", "words"),
    [
        ({"model_type": "glm4_moe"}, "model_type", "'glm_moe_dsa'"),
        ({"architectures": ["GlmMoeDsaModel"]}, "architectures", "GlmMoeDsaForCausalLM"),
        ({"model_type": "deepseek_v32"}, "model_type", "patched already"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "model_type", "patched already"),
        ({"auto_map": {"AutoModel": "custom.Model"}}, "auto_map", "allow its code explicitly"),
        ({"dtype": "float32"}, "dtype", "'bfloat16'"),
        ({"dtype": None}, "dtype", "'bfloat16'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "quantised already"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "not supported"),
        ({"n_group": 8}, "n_group", "not supported"),
        ({"scoring_func": "softmax"}, "scoring_func", "not supported"),
        ({"num_key_value_heads": 1}, "num_key_value_heads", "not supported"),
        ({"indexer_types": ["full", "shared", "full"]}, "indexer_types", "['full', 'full', 'full']"),
        ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types", "not supported"),
        ({"norm_topk_prob": None}, "norm_topk_prob", "None\n      allowed: True"),
        ({"norm_topk_prob": False}, "norm_topk_prob", "not supported"),
        ({"rope_interleave": None}, "rope_interleave", "not supported"),
        ({"index_topk_freq": 2}, "index_topk_freq", "1 (model.architecture)"),
        ({"index_topk_pattern": "FSF"}, "index_topk_pattern", "'FFF'"),
    ],
)
def test_what_the_checkpoint_must_not_be(change, key, words):
    found = _check(CONFIG | change)
    assert list(found) == [f"config.json: {key}"]
    assert words in str(found[f"config.json: {key}"])


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


def test_code_of_the_checkpoint_can_be_allowed():
    assert _check(CONFIG | {"auto_map": {"AutoModel": "custom.Model"}}, trust_remote_code=True) == {}


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
        ({"beta_fast": None, "beta_slow": None, "mscale": None}, []),
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
    assert "patched already" in _check(config, tensors, TINY)["config.json: model_type"].remedy


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


# ---- the patched copy ----


@pytest.fixture
def source(tmp_path):
    return make_small_checkpoint(tmp_path / "hf")


@pytest.fixture
def receipt(source):
    return Receipt("download_hf_checkpoint", record_files(source), {}, {})


def _state(folder):
    return {p.name: (hash_file(p), p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(folder.iterdir())}


def test_native_links_everything(source, receipt, tmp_path):
    files = patch_folder(source, tmp_path / "patched", "native", receipt)
    assert files == receipt.files
    assert all((tmp_path / "patched" / f.path).samefile(source / f.path) for f in files)


def test_the_alias_changes_two_files_of_a_copy(source, receipt, tmp_path):
    before, patched = _state(source), tmp_path / "patched"
    files = patch_folder(source, patched, "deepseek_v32", receipt)
    assert _state(source) == before
    assert record_files(patched) == tuple(dataclasses.replace(f, sha256="") for f in files)
    changed = {f.path for f in files} - {f.path for f in files if f in receipt.files}
    assert changed == {"config.json", "tokenizer_config.json", PATCH_FILE}
    assert all((patched / f.path).samefile(source / f.path) for f in files if f.path not in changed)
    config, tokenizer = read_object(patched / "config.json"), read_object(patched / "tokenizer_config.json")
    assert config == CONFIG | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    assert list(config) == list(read_object(source / "config.json"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == SPECIAL_TOKENS
    assert "extra_special_tokens" not in tokenizer
    assert set(check_layout(patched).infos) == set(TENSORS)


def test_the_patched_tokenizer_gives_the_same_tokens(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)
    original = AutoTokenizer.from_pretrained(source)
    patched = AutoTokenizer.from_pretrained(tmp_path / "patched")
    text = "sort the digits<|user|>abc<|end|>"
    assert patched(text).input_ids == original(text).input_ids
    assert patched.all_special_tokens == original.all_special_tokens
    assert patched.eos_token_id == original.eos_token_id


def test_patched_twice_holds_the_same_bytes(source, receipt, tmp_path):
    first = patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)
    inodes = {p.name: p.stat().st_ino for p in (tmp_path / "patched").iterdir() if p.name.endswith(".safetensors")}
    assert patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt) == first
    assert patch_folder(source, tmp_path / "other", "deepseek_v32", receipt) == first
    assert all((tmp_path / "patched" / name).stat().st_ino == inode for name, inode in inodes.items())


def test_the_patch_can_be_taken_back(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)
    undo_patch(tmp_path / "patched")
    assert record_files(tmp_path / "patched") == record_files(source)


def test_a_patched_folder_is_found_to_be_one(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)
    found = _check(read_object(tmp_path / "patched" / "config.json"))
    assert list(found) == ["config.json: model_type"]
    assert PATCH_FILE in found["config.json: model_type"].remedy


def test_relative_symlinks_where_hard_links_are_not_possible(source, receipt, tmp_path, monkeypatch):
    """The second name is refused by an error of the system here, as between two file systems."""

    def refuse(*_, **__):
        raise OSError(file_placement.errno.EXDEV, "another file system")

    monkeypatch.setattr(file_placement.os, "link", refuse)
    files = patch_folder(source, tmp_path / "store" / "patched.partial", "deepseek_v32", receipt)
    (tmp_path / "store" / "patched.partial").rename(tmp_path / "store" / "patched")
    link = tmp_path / "store" / "patched" / "model-00001-of-00003.safetensors"
    assert link.readlink().as_posix() == "../../hf/model-00001-of-00003.safetensors"
    assert record_files(tmp_path / "store" / "patched") == tuple(dataclasses.replace(f, sha256="") for f in files)
    assert patch_folder(source, tmp_path / "store" / "patched", "deepseek_v32", receipt) == files


@pytest.mark.parametrize(
    "tokens",
    [{"extra_special_tokens": {"image": "<i>"}}, {"additional_special_tokens": ["<i>"]}],
)
def test_special_tokens_that_cannot_be_renamed(source, receipt, tmp_path, tokens):
    write_object(source / "tokenizer_config.json", tokenizer_config() | tokens)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: extra_special_tokens must be a list"):
        patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)


def test_a_tokenizer_of_transformers_4_needs_no_change(source, tmp_path):
    write_object(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    receipt = Receipt("download_hf_checkpoint", record_files(source), {}, {})
    patch_folder(source, tmp_path / "patched", "deepseek_v32", receipt)
    assert list(hf_config.changes_for("deepseek_v32", source)) == ["config.json"]
    assert (tmp_path / "patched" / "tokenizer_config.json").samefile(source / "tokenizer_config.json")

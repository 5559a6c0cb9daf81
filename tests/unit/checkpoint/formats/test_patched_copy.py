import base64
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.rejections import rejected
from tests.support.small_checkpoint import (
    ARCHITECTURE,
    SPECIAL_TOKENS,
    config_of,
    make_small_checkpoint,
    tokenizer,
    tokenizer_config,
    write_object,
)
from tests.support.tiny_checkpoint import (
    QWEN3_5,
    TINY,
    TINY_MOONLIGHT,
    TINY_QWEN3_5,
    TINY_QWEN3_MOE,
    fuse_experts,
    make_random_checkpoint,
)
from transformers import AutoTokenizer

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.config_patch import PATCH_FILE, read_patch, undo_patch
from posttrain.checkpoint.formats.hf_config import check_config, fixed_values
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.patched_copy import alias_changes, patch_folder
from posttrain.checkpoint.formats.resaved_weights import published_specs
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.param_names import expected_tensors, require_tensors
from posttrain.checkpoint.staging import file_placement
from posttrain.config.schema import Model, Patch
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.tokenizer_check import check_tokenizer
from posttrain.store import Receipt, hash_file, record_files

NATIVE, ALIAS = (
    Model("small", architecture=ARCHITECTURE, patch=Patch(target)) for target in ("native", "deepseek_v32")
)


@pytest.fixture
def source(tmp_path):
    return make_small_checkpoint(tmp_path / "hf")


@pytest.fixture
def receipt(source):
    return Receipt("download_hf_checkpoint", record_files(source), {}, {})


def _state(folder):
    return {p.name: (hash_file(p), p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(folder.iterdir())}


def test_native_links_everything(source, receipt, tmp_path):
    files = patch_folder(source, tmp_path / "patched", NATIVE, receipt)
    assert files == receipt.files
    assert all((tmp_path / "patched" / f.path).samefile(source / f.path) for f in files)


def test_the_alias_changes_two_files_of_a_copy(source, receipt, tmp_path):
    before, patched = _state(source), tmp_path / "patched"
    files = patch_folder(source, patched, ALIAS, receipt)
    assert _state(source) == before
    assert record_files(patched) == tuple(dataclasses.replace(f, sha256="") for f in files)
    changed = {f.path for f in files} - {f.path for f in files if f in receipt.files}
    assert changed == {"config.json", "tokenizer_config.json", PATCH_FILE}
    assert all((patched / f.path).samefile(source / f.path) for f in files if f.path not in changed)
    config, tokenizer = read_object(patched / "config.json"), read_object(patched / "tokenizer_config.json")
    assert config == config_of(ARCHITECTURE) | {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
    }
    assert list(config) == list(read_object(source / "config.json"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == SPECIAL_TOKENS
    assert "extra_special_tokens" not in tokenizer
    assert set(check_layout(patched).infos) == set(expected_tensors(ARCHITECTURE))


def test_the_patched_tokenizer_gives_the_same_tokens(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", ALIAS, receipt)
    original = AutoTokenizer.from_pretrained(source)
    patched = AutoTokenizer.from_pretrained(tmp_path / "patched")
    text = "sort the digits<|user|>abc<|end|>"
    assert patched(text).input_ids == original(text).input_ids
    assert patched.all_special_tokens == original.all_special_tokens
    assert patched.eos_token_id == original.eos_token_id


def test_patched_twice_holds_the_same_bytes(source, receipt, tmp_path):
    first = patch_folder(source, tmp_path / "patched", ALIAS, receipt)
    inodes = {p.name: p.stat().st_ino for p in (tmp_path / "patched").iterdir() if p.name.endswith(".safetensors")}
    assert patch_folder(source, tmp_path / "patched", ALIAS, receipt) == first
    assert patch_folder(source, tmp_path / "other", ALIAS, receipt) == first
    assert all((tmp_path / "patched" / name).stat().st_ino == inode for name, inode in inodes.items())


def test_the_patch_can_be_taken_back(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", ALIAS, receipt)
    undo_patch(tmp_path / "patched")
    assert record_files(tmp_path / "patched") == record_files(source)


def test_a_patched_folder_is_found_to_be_one(source, receipt, tmp_path):
    patch_folder(source, tmp_path / "patched", ALIAS, receipt)
    found = check_config(
        read_object(tmp_path / "patched" / "config.json"), ARCHITECTURE, expected_tensors(ARCHITECTURE)
    )
    assert [problem.key for problem in found] == ["config.json: model_type"]
    assert PATCH_FILE in found[0].remedy


def test_relative_symlinks_where_hard_links_are_not_possible(source, receipt, tmp_path, monkeypatch):
    """The second name is refused by an error of the system here, as between two file systems."""

    def refuse(*_, **__):
        raise OSError(file_placement.errno.EXDEV, "another file system")

    monkeypatch.setattr(file_placement.os, "link", refuse)
    files = patch_folder(source, tmp_path / "store" / "patched.partial", ALIAS, receipt)
    (tmp_path / "store" / "patched.partial").rename(tmp_path / "store" / "patched")
    link = tmp_path / "store" / "patched" / "model-00001-of-00003.safetensors"
    assert link.readlink().as_posix() == "../../hf/model-00001-of-00003.safetensors"
    assert record_files(tmp_path / "store" / "patched") == tuple(dataclasses.replace(f, sha256="") for f in files)
    assert patch_folder(source, tmp_path / "store" / "patched", ALIAS, receipt) == files


@pytest.mark.parametrize(
    "tokens",
    [{"extra_special_tokens": {"image": "<i>"}}, {"additional_special_tokens": ["<i>"]}],
)
def test_special_tokens_that_cannot_be_renamed(source, receipt, tmp_path, tokens):
    write_object(source / "tokenizer_config.json", tokenizer_config() | tokens)
    with rejected("tokenizer-keys", "tokenizer_config.json: extra_special_tokens"):
        patch_folder(source, tmp_path / "patched", ALIAS, receipt)


def test_a_tokenizer_of_transformers_4_needs_no_change(source, tmp_path):
    write_object(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    receipt = Receipt("download_hf_checkpoint", record_files(source), {}, {})
    patch_folder(source, tmp_path / "patched", ALIAS, receipt)
    assert list(alias_changes(source)) == ["config.json"]
    assert (tmp_path / "patched" / "tokenizer_config.json").samefile(source / "tokenizer_config.json")


# ---- checkpoints as others release and save them ----


def _patch(source, target, architecture, **keys):
    """Check and patch as the script does; returns the copy, its problems."""
    model = Model("small", architecture=architecture, patch=Patch("native"), **keys)
    specs = published_specs(check_layout(source).infos, architecture)
    problems = check_config(read_object(source / "config.json"), architecture, specs)
    if not problems:
        patch_folder(source, target, model, Receipt("download_hf_checkpoint", record_files(source), {}, {}))
        problems = [*check_tokenizer(target, architecture.vocab_size)]
    return {problem.key: problem for problem in problems}


def _random_source(folder, architecture, **config):
    tensors = make_random_checkpoint(folder, architecture)
    write_object(folder / "config.json", read_object(folder / "config.json") | config)
    write_object(folder / "tokenizer.json", tokenizer())
    write_object(folder / "tokenizer_config.json", tokenizer_config() | {"chat_template": "{{ messages[0].content }}"})
    return tensors


def _edit_shards(folder, edit):
    """Change the tensors of each shard, and the index with them."""
    index = read_object(folder / "model.safetensors.index.json")
    for file in set(index["weight_map"].values()):
        tensors = edit(load_file(folder / file))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        others = {name: place for name, place in index["weight_map"].items() if place != file}
        index["weight_map"] = others | dict.fromkeys(tensors, file)
    write_object(folder / "model.safetensors.index.json", index)


AUTO_MAP = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
CHAT = (
    "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}go{% endif %}"
)
NAMES = {"56": "[BOS]", "57": "[EOS]", "58": "<|im_end|>", "59": "<|im_user|>"}


def _moonlight(folder, tokenizer_class):
    """As Moonlight's repository: code of its own, buffers among the weights, a vocabulary of tiktoken."""
    _random_source(folder, TINY_MOONLIGHT, auto_map=AUTO_MAP)
    (folder / "tokenizer.json").unlink()
    own = {"tokenizer_class": tokenizer_class, "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    added = {number: {"content": name, "special": True} for number, name in NAMES.items()}
    write_object(
        folder / "tokenizer_config.json",
        {**own, "chat_template": CHAT, "added_tokens_decoder": added, "eos_token": "[EOS]"},
    )
    pieces = [*"abcdefghijklmnopqrstuvwxyz 0123456789.,!?:\n-+='"]
    pieces += ["ab", "abc", " a", "12"]
    pieces += [f"{i}#" for i in range(56 - len(pieces))]
    lines = [f"{base64.b64encode(piece.encode()).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _edit_shards(folder, lambda tensors: tensors | (buffers if "model.embed_tokens.weight" in tensors else {}))
    return pieces


def test_a_repository_with_code_buffers_and_tiktoken_starts(tmp_path):
    pieces = _moonlight(tmp_path / "hf", "TikTokenTokenizer")
    assert _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT) == {}
    assert "auto_map" not in read_object(tmp_path / "patched" / "config.json")
    chat = ChatTokenizer(tmp_path / "patched")
    ids = chat.render([{"role": "user", "content": "abc 123ab"}])
    words = [*pieces, *NAMES.values(), *(f"<|reserved_token_{i}|>" for i in range(60, 64))]
    expected = ["<|im_user|>", "abc", " ", "12", "3", "ab", "<|im_end|>", "g", "o"]
    assert [words[i] for i in ids] == expected
    assert chat.decode(ids) == "abc 123abgo"
    assert chat.tokenizer.eos_token_id == 57
    assert len(chat.tokenizer) == 64
    assert not any(name.endswith("inv_freq") for name in CheckpointReader(tmp_path / "patched"))
    shard = CheckpointReader(tmp_path / "hf").file_of("model.embed_tokens.weight")
    assert (tmp_path / "patched" / shard).samefile(tmp_path / "hf" / shard)


def test_an_unknown_tokenizer_class_needs_a_key_that_helps(tmp_path):
    _moonlight(tmp_path / "hf", "SmallTokenizer")
    found = _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT)
    assert list(found) == ["tokenizer"]
    assert "model.tokenizer" in found["tokenizer"].remedy
    (tmp_path / "own").mkdir()
    write_object(tmp_path / "own" / "tokenizer.json", tokenizer())
    keys = {"tokenizer": str(tmp_path / "own")}
    assert _patch(tmp_path / "hf", tmp_path / "again", TINY_MOONLIGHT, **keys) == {}
    assert not (tmp_path / "again" / "tiktoken.model").exists()
    assert ChatTokenizer(tmp_path / "again").decode([0, 1]) in ("ab", "a b")


def test_a_tokenizer_larger_than_the_embedding_is_rejected(tmp_path):
    _random_source(tmp_path / "hf", TINY_MOONLIGHT)
    content = tokenizer()
    content["model"]["vocab"]["?"] = 64
    write_object(tmp_path / "hf" / "tokenizer.json", content)
    found = _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT)
    assert "ids below 64" in found["tokenizer"].allowed


def test_a_class_that_ignores_its_file_is_replaced(tmp_path):
    _random_source(tmp_path / "hf", TINY_MOONLIGHT)
    content = tokenizer() | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}}
    write_object(tmp_path / "hf" / "tokenizer.json", content)
    llama = {"tokenizer_class": "LlamaTokenizerFast", "chat_template": "x"}
    write_object(tmp_path / "hf" / "tokenizer_config.json", llama)
    assert _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT) == {}
    assert read_object(tmp_path / "patched" / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_chat_template_by_key(tmp_path):
    _random_source(tmp_path / "hf", TINY_MOONLIGHT)
    write_object(tmp_path / "hf" / "tokenizer_config.json", tokenizer_config())
    assert _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT) == {}
    with rejected("no-chat-template", "model.chat_template"):
        ChatTokenizer(tmp_path / "patched")
    (tmp_path / "own.jinja").write_text("ab{{ messages[0].content }}")
    assert _patch(tmp_path / "hf", tmp_path / "again", TINY_MOONLIGHT, chat_template=str(tmp_path / "own.jinja")) == {}
    assert ChatTokenizer(tmp_path / "again").render([{"role": "user", "content": "c"}]) == (0, 1, 2)
    undo_patch(tmp_path / "again")
    assert record_files(tmp_path / "again") == record_files(tmp_path / "hf")


def test_a_chat_template_by_key_replaces_the_checkpoints(tmp_path):
    _random_source(tmp_path / "hf", TINY_MOONLIGHT)
    (tmp_path / "hf" / "chat_template.jinja").write_text("z")
    (tmp_path / "own.jinja").write_text("ab{{ messages[0].content }}")
    assert (
        _patch(tmp_path / "hf", tmp_path / "patched", TINY_MOONLIGHT, chat_template=str(tmp_path / "own.jinja")) == {}
    )
    assert ChatTokenizer(tmp_path / "patched").render([{"role": "user", "content": "c"}]) == (0, 1, 2)
    assert "chat_template" not in read_object(tmp_path / "patched" / "tokenizer_config.json")
    with rejected("origin-lost", "chat_template.jinja"):
        undo_patch(tmp_path / "patched")


@pytest.mark.parametrize("architecture", [TINY, TINY_QWEN3_MOE], ids=lambda arch: arch.model_type)
def test_fused_experts_become_the_published_ones(tmp_path, architecture):
    tensors = _random_source(tmp_path / "hf", architecture)
    whole = {file: load_file(tmp_path / "hf" / file) for file in {*CheckpointReader(tmp_path / "hf").index.files}}
    save_file(
        fuse_experts({n: t for shard in whole.values() for n, t in shard.items()}, 4),
        tmp_path / "hf" / "model.safetensors",
    )
    for file in (*whole, "model.safetensors.index.json"):
        (tmp_path / "hf" / file).unlink()
    assert _patch(tmp_path / "hf", tmp_path / "patched", architecture) == {}
    reader = CheckpointReader(tmp_path / "patched")
    require_tensors(reader, architecture)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())
    changes = {change.path: change.new for change in read_patch(tmp_path / "patched")["model.safetensors"]}
    prefix = "model.layers.1.mlp.experts."
    assert changes[f"{prefix}down_proj"] == f"4 from {prefix}0.down_proj.weight on, BF16 [64, 32]"
    with rejected("origin-lost", "model.safetensors"):
        undo_patch(tmp_path / "patched")


def test_experts_fused_in_another_order_are_named(tmp_path):
    _random_source(tmp_path / "hf", TINY_QWEN3_MOE)
    _edit_shards(
        tmp_path / "hf",
        lambda tensors: {
            name.replace(".0.down_proj.weight", ".down_proj"): torch.zeros(4, 32, 64, dtype=torch.bfloat16)
            if "layers.0.mlp.experts.0.down" in name
            else tensor
            for name, tensor in tensors.items()
        },
    )
    found = _patch(tmp_path / "hf", tmp_path / "patched", TINY_QWEN3_MOE)
    assert (
        "model.layers.0.mlp.experts.down_proj: unknown to the architecture, BF16 [4, 32, 64]" in found["tensors"].value
    )


def test_a_router_bias_in_bf16_is_widened(tmp_path):
    tensors = _random_source(tmp_path / "hf", TINY)
    ends = "e_score_correction_bias"
    _edit_shards(tmp_path / "hf", lambda held: {n: t.bfloat16() if n.endswith(ends) else t for n, t in held.items()})
    assert _patch(tmp_path / "hf", tmp_path / "patched", TINY) == {}
    reader = CheckpointReader(tmp_path / "patched")
    require_tensors(reader, TINY)
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor.bfloat16().float() if name.endswith(ends) else tensor)
    links = [file for file in reader.index.files if (tmp_path / "patched" / file).samefile(tmp_path / "hf" / file)]
    assert 0 < len(links) < len(reader.index.files)


def test_lost_mtp_layers_are_named_and_accepted_by_key(tmp_path):
    without = dataclasses.replace(TINY, num_nextn_predict_layers=0)
    _random_source(tmp_path / "hf", without, num_nextn_predict_layers=1)
    found = _patch(tmp_path / "hf", tmp_path / "patched", TINY)
    assert list(found) == ["tensors"]
    assert "model.architecture.num_nextn_predict_layers to 0" in found["tensors"].remedy
    assert _patch(tmp_path / "hf", tmp_path / "patched", without) == {}
    assert read_object(tmp_path / "patched" / "config.json")["num_nextn_predict_layers"] == 0
    (change,) = read_patch(tmp_path / "patched")["config.json"]
    assert (change.old, change.new) == (1, 0)


def test_lost_mtp_layers_of_a_section_are_corrected_there(tmp_path):
    without = dataclasses.replace(TINY_QWEN3_5, num_nextn_predict_layers=0)
    counted = hub_config(TINY_QWEN3_5, fixed_values(TINY_QWEN3_5))["text_config"]
    _random_source(tmp_path / "hf", without, text_config=counted)
    # transformers has a byte-level class for the family, and this tokenizer is none.
    assert [*_patch(tmp_path / "hf", tmp_path / "patched", without)] == ["tokenizer_config.json: tokenizer_class"]
    assert read_object(tmp_path / "patched" / "config.json")["text_config"]["mtp_num_hidden_layers"] == 0
    (change,) = read_patch(tmp_path / "patched")["config.json"]
    assert (change.path, change.old, change.new) == ("/text_config/mtp_num_hidden_layers", 1, 0)


def _keys_of_engines(arch):
    return {"full_attention_interval": arch.full_attention_interval, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("arch", QWEN3_5.values(), ids=QWEN3_5)
@pytest.mark.parametrize("null", [[], ["partial_rotary_factor"]], ids=["absent", "null"])
def test_keys_that_engines_read_are_added_to_what_transformers_writes(tmp_path, arch, null):
    source, first, second = (tmp_path / name for name in ("hf", "first", "second"))
    _random_source(source, arch)
    written, added = read_object(source / "config.json"), _keys_of_engines(arch)
    assert not {*added} & {*written["text_config"]}
    written["text_config"] = dict.fromkeys(null) | written["text_config"]
    write_object(source / "config.json", written)
    _patch(source, first, arch)
    text = read_object(first / "config.json")["text_config"]
    assert text == written["text_config"] | added
    assert text["partial_rotary_factor"] == text["rope_parameters"]["partial_rotary_factor"]
    assert [change.path for change in read_patch(first)["config.json"]] == [f"/text_config/{key}" for key in added]
    # The copy of a copy has nothing to change.
    _patch(first, second, arch)
    assert (second / "config.json").samefile(first / "config.json")
    undo_patch(first)
    assert json.dumps(read_object(first / "config.json")) == json.dumps(written)


def test_a_file_with_the_keys_that_engines_read_is_linked(tmp_path):
    _random_source(tmp_path / "hf", TINY_QWEN3_5)
    write_object(tmp_path / "hf" / "config.json", hub_config(TINY_QWEN3_5, fixed_values(TINY_QWEN3_5)))
    _patch(tmp_path / "hf", tmp_path / "patched", TINY_QWEN3_5)
    assert (tmp_path / "patched" / "config.json").samefile(tmp_path / "hf" / "config.json")


def test_mtp_layers_that_are_there_are_not_called_lost(tmp_path):
    _random_source(tmp_path / "hf", TINY, num_nextn_predict_layers=1)
    found = _patch(tmp_path / "hf", tmp_path / "patched", dataclasses.replace(TINY, num_nextn_predict_layers=0))
    assert "config.json: num_nextn_predict_layers" in found

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from tests.support.rejections import assert_rejection, rejected
from tests.support.tiny_checkpoint import QWEN3_5, TINY, TINY_QWEN3
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GlmMoeDsaForCausalLM,
)

from posttrain.checkpoint.formats.config_sections import keys_of_engines
from posttrain.checkpoint.formats.hf_config import check_config
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.param_names import compare_tensors
from posttrain.checkpoint.tiny import model as tiny_model
from posttrain.checkpoint.tiny import warm_up as tiny_warm_up
from posttrain.checkpoint.tiny.model import make_tiny_model, measure_pass_rate
from posttrain.checkpoint.tiny.tokenizer import Vocabulary, vocabulary_of
from posttrain.config.families import dimensions
from posttrain.rl.data.chat import ChatTokenizer, stop_token_ids
from posttrain.rl.data.sort_digits import generate_prompts
from posttrain.rl.data.tokenizer_check import check_tokenizer
from posttrain.store import partial_of, record_files

ARCHITECTURE = dataclasses.replace(TINY, routed_scaling_factor=1.0)
NUM_DIGITS = 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make(folder, seed: int = 0, num_steps: int = 3) -> float:
    train, heldout = generate_prompts(NUM_DIGITS, 60, 20, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_warm_up, "NUM_STEPS", num_steps)
        patch.setattr(tiny_model, "PASS_RATE_LIMITS", (0.0, 1.0))
        return make_tiny_model(folder, ARCHITECTURE, train, heldout, seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp("made") / "model"
    return folder, _make(folder, num_steps=80)


def test_it_has_the_files_of_a_hub_repository(made):
    folder, _ = made
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) >= tiny_model.MIN_SHARDS
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    others = {path.name for path in folder.iterdir()} - set(shards)
    assert others == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }


def test_its_tensors_are_those_of_the_architecture(made):
    reader = CheckpointReader(made[0])
    assert compare_tensors(ARCHITECTURE, {name: info.spec for name, info in reader.infos.items()}) == []


def test_its_index_is_complete_and_its_size_true(made):
    folder, _ = made
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 (the file is no dict)
                found[name] = shard.name
                total += file.get_tensor(name).nbytes
    assert index == {"metadata": {"total_size": total}, "weight_map": found}


def test_router_biases_and_the_mtp_layer_are_not_zero(made):
    reader = CheckpointReader(made[0])
    biases = [name for name in reader.infos if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3  # two MoE layers and the MTP layer
    for name in biases:
        bias = reader.tensor(name)
        assert bias.dtype == torch.float32
        assert bias.unique().numel() == ARCHITECTURE.n_routed_experts
        assert 0 < bias.abs().max() < 0.2
    mtp = [name for name in reader.infos if name.startswith(f"model.layers.{ARCHITECTURE.num_hidden_layers}.")]
    assert len(mtp) > 30
    # A LayerNorm starts with a bias of zero; nothing else does.
    assert all(reader.tensor(name).any() for name in mtp if not name.endswith("k_norm.bias"))


def test_transformers_loads_it_and_leaves_out_only_the_mtp_layer(made):
    model, info = AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float32, output_loading_info=True)
    assert type(model) is GlmMoeDsaForCausalLM
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {name.split(".")[2] for name in info["unexpected_keys"]} <= {str(ARCHITECTURE.num_hidden_layers)}
    reader = CheckpointReader(made[0])
    experts = model.model.layers[1].mlp.experts
    for part, rows in (("gate_proj", slice(0, 32)), ("up_proj", slice(32, 64))):
        saved = reader.tensor(f"model.layers.1.mlp.experts.3.{part}.weight")
        assert torch.equal(experts.gate_up_proj[3, rows], saved.float())


def test_its_config_says_what_the_architecture_says(made):
    config = AutoConfig.from_pretrained(made[0])
    wanted = dimensions(ARCHITECTURE)
    assert config.rope_parameters == {"rope_theta": wanted.pop("rope_theta"), "rope_type": "default"}
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.architectures == ["GlmMoeDsaForCausalLM"]
    assert config.dtype == torch.bfloat16
    generation = GenerationConfig.from_pretrained(made[0])
    assert generation.eos_token_id == config.eos_token_id
    assert len(generation.eos_token_id) == 3


def test_sequences_are_much_longer_than_the_indexers_topk(made):
    train, _ = generate_prompts(4, 5, 5, seed=0)
    chat = ChatTokenizer(made[0])
    lengths = [len(chat.render(row["prompt"])) + len(row["label"]) + 1 for row in train]
    assert min(lengths) == max(lengths) == 33
    assert min(lengths) >= 3.5 * 8


def test_the_pass_rate_is_the_probability_of_the_right_answers(made):
    folder, measured = made
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _, rows = generate_prompts(NUM_DIGITS, 60, 20, 0)
    chat = ChatTokenizer(folder)
    prompts = torch.tensor([chat.render(row["prompt"]) for row in rows])
    answers = torch.tensor([[*chat.tokenizer.encode(row["label"]), chat.tokenizer.eos_token_id] for row in rows])
    with torch.no_grad():
        logits = model(torch.cat([prompts, answers], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    right = logits.log_softmax(-1).gather(-1, answers[..., None]).sum((1, 2)).exp()
    # 80 draws: one standard deviation is at most 0.056.
    assert measured == pytest.approx(right.mean().item(), abs=0.2)
    examples = tiny_warm_up.Examples(prompts.repeat(50, 1), answers.repeat(50, 1), answers.repeat(50, 1))
    many = measure_pass_rate(model, examples, torch.Generator().manual_seed(0))
    assert many == pytest.approx(right.mean().item(), abs=0.03)
    assert many > 0.02


def test_the_same_seed_gives_the_same_bytes_whatever_the_global_state(tmp_path):
    torch.manual_seed(1)
    _make(tmp_path / "first")
    torch.manual_seed(2)
    before = torch.get_rng_state()
    _make(tmp_path / "second")
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert record_files(tmp_path / "first") == record_files(tmp_path / "second")
    _make(tmp_path / "third", seed=1)
    shard = "model-00001-of-"
    first, third = (record_files(tmp_path / name) for name in ("first", "third"))
    assert [r for r in first if r.path.startswith(shard)] != [r for r in third if r.path.startswith(shard)]


def test_what_an_attempt_left_behind_does_not_stay(tmp_path):
    folder = tmp_path / "model"
    partial_of(folder).mkdir()
    (partial_of(folder) / "model-00009-of-00009.safetensors").write_bytes(b"half")
    _make(folder)
    assert not partial_of(folder).exists()
    assert not (folder / "model-00009-of-00009.safetensors").exists()


def test_a_qwen3_is_made_with_the_tensors_and_values_of_its_class(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_warm_up, "NUM_STEPS", 2)
    monkeypatch.setattr(tiny_model, "PASS_RATE_LIMITS", (0.0, 1.0))
    make_tiny_model(tmp_path / "model", TINY_QWEN3, *generate_prompts(NUM_DIGITS, 60, 20, 0), seed=0)
    layout = check_layout(tmp_path / "model")
    assert "lm_head.weight" not in layout.infos
    assert check_config(read_object(tmp_path / "model" / "config.json"), TINY_QWEN3, layout.infos) == []
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", QWEN3_5)
def test_a_qwen3_5_is_made_with_a_vision_tower_and_an_mtp_layer(tmp_path, monkeypatch, name):
    arch = QWEN3_5[name]
    monkeypatch.setattr(tiny_warm_up, "NUM_STEPS", 2)
    monkeypatch.setattr(tiny_model, "PASS_RATE_LIMITS", (0.0, 1.0))
    folder = tmp_path / "model"
    make_tiny_model(folder, arch, *generate_prompts(NUM_DIGITS, 60, 20, 0), seed=0)
    layout = check_layout(folder)
    assert check_config(read_object(folder / "config.json"), arch, layout.infos) == []
    text = read_object(folder / "config.json")["text_config"]
    assert keys_of_engines(arch).items() <= text.items()
    assert text["rope_parameters"]["partial_rotary_factor"] == text["partial_rotary_factor"] == 0.5
    assert check_tokenizer(folder, arch.vocab_size) == []
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert [type(model).__name__] == read_object(folder / "config.json")["architectures"]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    kept = [name for name in layout.infos if name.startswith(("mtp.", "model.visual."))]
    values = {name: layout.tensor(name).float() for name in kept}
    assert all(value.unique().numel() > 1 for value in values.values()), "none is all zeros or ones"
    assert torch.equal(model.model.visual.pos_embed.weight.float(), values["model.visual.pos_embed.weight"])
    assert stop_token_ids(folder) == {*GenerationConfig.from_pretrained(folder).eos_token_id}


def test_a_task_beyond_ascii_is_refused_for_a_byte_level_tokenizer(tmp_path):
    arch = dataclasses.replace(QWEN3_5["qwen3_5"], vocab_size=128)
    known = Vocabulary(("\n", "ä", *"0123456789abc"))
    with rejected("vocabulary-not-ascii", "ä", key="data.task"):
        make_tiny_model(tmp_path / "model", arch, *generate_prompts(NUM_DIGITS, 60, 20, 0), seed=0, known=known)


def test_an_architecture_that_cannot_be_made_is_refused(tmp_path):
    wrong = dataclasses.replace(ARCHITECTURE, model_type="deepseek_v3", vocab_size=63)
    with rejected("vocabulary-too-small", "63", "64", key="model.architecture.vocab_size") as refused:
        make_tiny_model(tmp_path / "model", wrong, *generate_prompts(NUM_DIGITS, 60, 20, 0), seed=0)
    assert_rejection(refused.value, "family-not-made", "deepseek_v3", key="model.architecture.model_type")


def test_a_task_needs_room_for_its_tokens_and_batches_of_one_length(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_warm_up, "NUM_TASK_STEPS", 2)
    monkeypatch.setattr(tiny_model, "PASS_RATE_LIMITS", (0.0, 1.0))
    rows = [
        {"prompt": [{"role": "user", "content": f"Add these numbers: {a} and {b}."}], "label": str(a + b)}
        for a in range(2, 40)
        for b in range(2, 9)
    ]
    known = vocabulary_of([row["prompt"][0]["content"] for row in rows], [row["label"] for row in rows])
    make_tiny_model(tmp_path / "model", TINY_QWEN3, rows, rows, 0, known)
    chat = ChatTokenizer(tmp_path / "model")
    assert chat.decode(chat.render(rows[0]["prompt"])).split("\n")[1] == "Add these numbers: 2 and 2."
    wide = Vocabulary(tuple(map(chr, range(32, 112))))
    with rejected("vocabulary-too-small", "at least 93", key="model.architecture.vocab_size"):
        make_tiny_model(tmp_path / "other", TINY_QWEN3, rows, rows, 0, wide)


def test_a_model_that_learned_too_little_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_warm_up, "NUM_STEPS", 2)
    with pytest.raises(RuntimeError, match=r"seed 0 has a sampled pass rate of 0.0\d\d after its warm-up, not between"):
        make_tiny_model(tmp_path / "model", ARCHITECTURE, *generate_prompts(NUM_DIGITS, 60, 20, 0), seed=0)
    assert list(tmp_path.iterdir()) == []

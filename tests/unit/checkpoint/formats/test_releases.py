"""Every model of config/models, laid out as its repository is: small dimensions, vocabulary and templates of ours.

What is told of a release: files and classes, not contents. Sources: the repositories named in config/models, at the
commits pinned there; Moonlight's tokenizer by its `tokenization_moonshot.py`.
"""

import base64
import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.resolved_words import CONFIG_DIR
from tests.support.small_checkpoint import tokenizer, write_object
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.hf_config import check_config, fixed_values
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.patched_copy import patch_folder
from posttrain.checkpoint.formats.resaved_weights import published_specs
from posttrain.checkpoint.formats.torch_dist import Conversion, verify_torch_dist
from posttrain.checkpoint.hub.local_folder import list_folder
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.config.load import read_yaml
from posttrain.config.schema import Architecture, Model, Patch, RopeScaling
from posttrain.config.vision import VisionTower
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.tokenizer_check import check_tokenizer
from posttrain.store import Receipt, record_files

# Macros, namespaces, loops, tests, tools, reasoning: what the templates of these families use.
TEMPLATE = (
    "{%- macro text(m) -%}{{ m.content | trim }}{%- endmacro -%}{%- set ns = namespace(last=0) -%}"
    "{%- if tools is defined and tools -%}tools {{ tools | tojson }}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{{ text(m) }}?"
    "{%- if m.reasoning_content is string and loop.index0 > ns.last -%}{{ m.reasoning_content }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}a{%- if enable_thinking is defined and not enable_thinking -%}b"
    "{%- endif -%}{%- endif -%}"
)
JINJA, IN_CONFIG, NONE = "chat_template.jinja", "tokenizer_config.json", ""
GLM = ("TokenizersBackend", JINJA)
DEEPSEEK_CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
# Tokenizer class, where the chat template is, keys of config.json beside those of the architecture.
RELEASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **dict.fromkeys(("glm5", "glm5.1", "glm5.2", "glm5.3", "glm5_4layer", "glm5_20layer"), (*GLM, {})),
    "glm4.5_air": ("PreTrainedTokenizerFast", JINJA, {}),
    "deepseek_v3": ("LlamaTokenizerFast", IN_CONFIG, {"auto_map": DEEPSEEK_CODE, "ep_size": 1}),
    "deepseek_v3.2": ("LlamaTokenizerFast", NONE, {"ep_size": 1}),
    "moonlight": ("TikTokenTokenizer", IN_CONFIG, {"auto_map": DEEPSEEK_CODE, "ep_size": 1, "seq_aux": True}),
    **dict.fromkeys(
        ("qwen3_0.6b", "qwen3_4b", "qwen3_30b_a3b"), ("Qwen2Tokenizer", IN_CONFIG, {"sliding_window": None})
    ),
    **dict.fromkeys(("qwen3.5_4b", "qwen3.5_35b_a3b"), ("Qwen2Tokenizer", JINJA, {"image_token_id": 2})),
}
SMALL = {
    **{
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 16,
    },
    **{"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "q_lora_rank": 24},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16, "index_n_heads": 2},
    **{"index_head_dim": 8, "index_topk": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    **{"shared_expert_intermediate_size": 24, "full_attention_interval": 2},
}
TOWER = VisionTower(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, num_position_embeddings=4)


def _small(name: str) -> Architecture:
    said = read_yaml(CONFIG_DIR / "models" / f"{name}.yaml")["model"]["architecture"]
    vision = TOWER if "vision" in said else VisionTower()
    scaling = RopeScaling(**said.get("rope_scaling", {}))
    arch = Architecture(**{**said, "rope_scaling": scaling, "vision": vision})
    return dataclasses.replace(arch, **{key: value for key, value in SMALL.items() if getattr(arch, key)})


def _release(folder, name: str) -> Architecture:
    """Write a repository's files."""
    arch, (tokenizer_class, template, more) = _small(name), RELEASES[name]
    folder.mkdir()
    config = hub_config(arch, fixed_values(arch))
    if arch.vision.depth:
        config.pop("dtype")  # the language model's section says it
        spelled = {}
    else:
        config, spelled = _in_transformers_4(config, arch)
    write_object(folder / "config.json", {**config, **spelled, "use_cache": True, "eos_token_id": 1, **more})
    write_object(folder / "generation_config.json", {"eos_token_id": 1})
    _write_tokenizer(folder, tokenizer_class, template)
    (folder / "modeling_own.py").write_text("raise SystemExit('code of the repository was run')\n")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    tensors = {name: torch.zeros(spec.shape, dtype=dtypes[spec.dtype]) for name, spec in expected_tensors(arch).items()}
    if name == "moonlight":
        tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return arch


def _in_transformers_4(config: dict[str, Any], arch: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the file without its positions and dtype, and these as transformers 4 spells them."""
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    spelled = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if arch.rope_scaling.factor > 1:
        spelled["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    elif arch.partial_rotary_factor:
        spelled["partial_rotary_factor"] = arch.partial_rotary_factor
    return config, spelled


def _write_tokenizer(folder, tokenizer_class: str, template: str) -> None:
    own = {"tokenizer_class": tokenizer_class, **({"chat_template": TEMPLATE} if template == IN_CONFIG else {})}
    if template == JINJA:
        (folder / JINJA).write_text(TEMPLATE)
    if tokenizer_class == "TikTokenTokenizer":
        own |= {"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}}
        own |= {"added_tokens_decoder": {"60": {"content": "[EOS]", "special": True}}, "eos_token": "[EOS]"}
        lines = [f"{base64.b64encode(bytes([byte])).decode()} {rank}" for rank, byte in enumerate(range(63, 123))]
        (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    elif tokenizer_class == "Qwen2Tokenizer" and template == JINJA:
        # transformers takes this class for the family, whatever the file names, and it is byte-level.
        letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ?")}
        Qwen3_5Tokenizer(vocab=letters, merges=[]).save_pretrained(folder)
    else:
        write_object(folder / "tokenizer.json", tokenizer())
    write_object(folder / "tokenizer_config.json", own)


def _start(source, target, arch: Architecture, **keys: str) -> list[str]:
    """List, check and patch; returns the keys of what is wrong."""
    assert "modeling_own.py" not in [file.path for file in list_folder(source).files]
    specs = published_specs(check_layout(source).infos, arch)
    problems = check_config(read_object(source / "config.json"), arch, specs)
    if problems:
        return [problem.key for problem in problems]
    model = Model("small", architecture=arch, patch=Patch("native"), **keys)
    patch_folder(source, target, model, Receipt("", record_files(source), {}, {}))
    return [problem.key for problem in check_tokenizer(target, arch.vocab_size)]


def test_every_model_that_is_not_made_is_here() -> None:
    made = {"tiny", "tiny_qwen3", "tiny_qwen3.5", "tiny_qwen3.5_moe"}
    assert {path.stem for path in (CONFIG_DIR / "models").glob("*.yaml")} - made == {*RELEASES}


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_starts(tmp_path, name: str) -> None:
    arch, keys = _release(tmp_path / "hf", name), {}
    if RELEASES[name][1] == NONE:
        assert _start(tmp_path / "hf", tmp_path / "without", arch) == []
        with rejected("no-chat-template", "model.chat_template"):
            ChatTokenizer(tmp_path / "without")
        (tmp_path / "own.jinja").write_text(TEMPLATE)
        keys = {"chat_template": str(tmp_path / "own.jinja")}
    assert _start(tmp_path / "hf", tmp_path / "patched", arch, **keys) == []
    for file in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in read_object(tmp_path / "patched" / file)
    chat = ChatTokenizer(tmp_path / "patched")
    text = chat.tokenizer.decode(chat.render([{"role": "user", "content": " abc "}])).replace(" ", "")
    assert text == "abc?a"
    make_folder(Conversion(tmp_path / "patched", "s1", arch, 10**9), tmp_path / "torch_dist", 2, 1)
    assert verify_torch_dist(tmp_path / "patched", tmp_path / "torch_dist", arch) == len(expected_tensors(arch))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3.2"])
def test_a_release_in_fp8_names_the_step_that_makes_it_bf16(tmp_path, name: str) -> None:
    arch = _release(tmp_path / "hf", name)
    content = read_object(tmp_path / "hf" / "config.json") | {"quantization_config": {"quant_method": "fp8"}}
    (problem,) = check_config(content, arch, expected_tensors(arch))
    assert "snakemake finalize_bf16" in problem.remedy

"""A random checkpoint of a few hundred kB in Hub layout, made without a model: for tests of file handling."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.config.families import dimensions
from posttrain.config.schema import Architecture

ARCHITECTURE = Architecture(
    model_type="glm_moe_dsa",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=4,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=4,
    num_nextn_predict_layers=1,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
)
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "[MASK]"]


def make_small_checkpoint(
    folder: Path, architecture: Architecture = ARCHITECTURE, num_shards: int = 3, seed: int = 0
) -> Path:
    """Write config, tokenizer files, shards with an index, and two files that nobody needs."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    names, weight_map, total = list(expected_tensors(architecture).items()), {}, 0
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        tensors = {}
        for name, spec in names[shard::num_shards]:
            dtype = torch.float32 if spec.dtype == "F32" else torch.bfloat16
            tensors[name] = torch.randn(spec.shape, generator=generator).to(dtype)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_object(folder / "model.safetensors.index.json", index)
    write_object(folder / "config.json", config_of(architecture))
    write_object(folder / "tokenizer_config.json", tokenizer_config())
    write_object(folder / "tokenizer.json", tokenizer())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    (folder / "README.md").write_text("not needed\n")
    return folder


def config_of(architecture: Architecture) -> dict:
    """Return `config.json` as the Hub has it: rope in `rope_parameters`, everything else under our names."""
    config = {key: value for key, value in dimensions(architecture).items() if key != "rope_theta"}
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        **config,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": architecture.rope_theta, "rope_type": "default"},
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
    }


def tokenizer_config() -> dict:
    """Return `tokenizer_config.json` as transformers 5 writes it."""
    return {
        "backend": "tokenizers",
        "eos_token": "<|end|>",
        "extra_special_tokens": SPECIAL_TOKENS,
        "model_max_length": 128,
        "tokenizer_class": "TokenizersBackend",
    }


def tokenizer() -> dict:
    """Return a `tokenizer.json` with one token per letter."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    added = [
        {
            "id": len(letters) + i,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    model = {"type": "WordLevel", "vocab": letters, "unk_token": "?"}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "model": model,
    }


def write_object(path: Path, content: dict) -> None:
    """Write JSON the way transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

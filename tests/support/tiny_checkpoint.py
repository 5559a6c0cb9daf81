"""A random checkpoint in the layout of a Hub repository, for tests: small and seeded.

Names and shapes come from the `transformers` model, not from our table of names. The MTP layers are further
decoder layers plus the four tensors that join them to the model. All weights are random, norms and router
biases included.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from posttrain.config.families import dimensions, family_of
from posttrain.config.schema import Architecture, RopeScaling, VisionTower

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TINY = Architecture(
    model_type="glm_moe_dsa",
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    num_attention_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=8,
    num_nextn_predict_layers=1,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
)
# Heads wide enough that index scores differ, top-k an eighth of the longest sequence used.
TRAINED = dataclasses.replace(TINY, num_hidden_layers=4, n_routed_experts=8)
TINY_DEEPSEEK = dataclasses.replace(TINY, model_type="deepseek_v3", index_n_heads=0, index_head_dim=0, index_topk=0)
# As GLM-5.2: layers 0 and 2 choose keys, layers 1 and 3 take their choice over.
TINY_SHARING = dataclasses.replace(TINY, num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=1)
# As Moonlight: no query latent.
TINY_MOONLIGHT = dataclasses.replace(TINY_DEEPSEEK, q_lora_rank=0, num_nextn_predict_layers=0)
# As DeepSeek-V3: experts in groups, positions scaled by YaRN.
TINY_YARN = dataclasses.replace(
    TINY_DEEPSEEK,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    rope_scaling=RopeScaling(factor=8.0, original_max_position_embeddings=32, mscale_all_dim=1.0),
)

TINY_V32 = dataclasses.replace(TINY_YARN, model_type="deepseek_v32", index_n_heads=4, index_head_dim=16, index_topk=8)

TINY_QWEN3 = Architecture(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    intermediate_size=96,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
)
TINY_QWEN3_MOE = dataclasses.replace(
    TINY_QWEN3,
    model_type="qwen3_moe",
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    tie_word_embeddings=False,
)
TINY_GLM4_MOE = dataclasses.replace(
    TINY_QWEN3_MOE,
    model_type="glm4_moe",
    first_k_dense_replace=1,
    n_shared_experts=1,
    routed_scaling_factor=1.5,
    partial_rotary_factor=0.5,
    attention_bias=True,
    num_nextn_predict_layers=1,
)
# As Qwen3.5: gated delta nets, each second layer attends, an MTP layer and a vision tower.
TINY_QWEN3_5 = dataclasses.replace(
    TINY_QWEN3,
    model_type="qwen3_5",
    num_hidden_layers=4,
    num_attention_heads=4,
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    partial_rotary_factor=0.5,
    num_nextn_predict_layers=1,
    vision=VisionTower(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, num_position_embeddings=16),
)
TINY_QWEN3_5_MOE = dataclasses.replace(
    TINY_QWEN3_5,
    model_type="qwen3_5_moe",
    intermediate_size=0,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    tie_word_embeddings=False,
)
QWEN3_5 = {arch.model_type: arch for arch in (TINY_QWEN3_5, TINY_QWEN3_5_MOE)}
TINY_QWEN3_UNTIED = dataclasses.replace(TINY_QWEN3, tie_word_embeddings=False)
# One of each family that checkpoints are converted of.
FAMILIES = {arch.model_type: arch for arch in (TINY, TINY_DEEPSEEK, TINY_GLM4_MOE, TINY_QWEN3, TINY_QWEN3_MOE)}
# What families have in some of their models only.
VARIANTS = {
    "glm_moe_dsa_sharing": TINY_SHARING,
    "deepseek_v3_no_q_lora": TINY_MOONLIGHT,
    "deepseek_v3_yarn": TINY_YARN,
    "deepseek_v32": TINY_V32,
    "glm4_moe_qk_norm": dataclasses.replace(TINY_GLM4_MOE, use_qk_norm=True),
    "qwen3_untied": TINY_QWEN3_UNTIED,
}
ALL = {**FAMILIES, **VARIANTS}


def make_random_checkpoint(
    folder: Path, architecture: Architecture = TINY, seed: int = 0, num_shards: int = 3
) -> dict[str, torch.Tensor]:
    """Write config.json, shards and index to `folder`, and return the tensors."""
    tensors = random_tensors(architecture, seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers_config(architecture, architecture.num_hidden_layers)
    config.save_pretrained(folder)
    write_shards(folder, tensors, num_shards)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}\n')
    return tensors


def random_tensors(architecture: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors under the Hub's names: BF16, router biases, decays and norms of delta nets FP32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in hub_shapes(architecture).items():
        is_norm = "norm" in name and name.endswith("weight")
        is_around_0 = family_of(architecture).zero_centered_norms and not name.endswith("linear_attn.norm.weight")
        value = torch.randn(shape, generator=generator) * 0.05 + float(is_norm and not is_around_0)
        is_wide = name.endswith(("e_score_correction_bias", "linear_attn.A_log", "linear_attn.norm.weight"))
        tensors[name] = value if is_wide else value.bfloat16()
    return tensors


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    """Write shards of about equal size, in the tensors' order, and their index."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map, seen = {}, 0
    for name, tensor in tensors.items():
        shard = min(num_shards, 1 + seen * num_shards // total)
        weight_map[name] = f"model-{shard:05d}-of-{num_shards:05d}.safetensors"
        seen += tensor.nbytes
    for file in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def fuse_experts(tensors: Mapping[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer, as transformers 5 holds and saves them."""
    layers = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:
        gate, up, down = (
            [tensors[f"{layer}.experts.{expert}.{part}_proj.weight"] for expert in range(num_experts)]
            for part in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        fused[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        fused[f"{layer}.experts.down_proj"] = torch.stack(down)
    return fused


def hub_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors, those of its MTP layers at the end."""
    layers, num_mtp = architecture.num_hidden_layers, architecture.num_nextn_predict_layers
    with torch.device("meta"):
        model = _transformers_model(architecture, layers + num_mtp)
    shapes = {}
    tied = {"lm_head.weight"} if architecture.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        shapes |= _per_expert(name, tuple(tensor.shape))
    width = architecture.hidden_size
    if apart := family_of(architecture).mtp_prefix:
        return _with_mtp_apart(shapes, architecture, apart)
    for layer in range(layers, layers + num_mtp):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (width,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{prefix}eh_proj.weight"] = (width, 2 * width)
    is_mtp = {name: name.startswith("model.layers.") and int(name.split(".")[2]) >= layers for name in shapes}
    return dict(sorted(shapes.items(), key=lambda item: is_mtp[item[0]]))


def _with_mtp_apart(
    shapes: Mapping[str, tuple[int, ...]], architecture: Architecture, apart: str
) -> dict[str, tuple[int, ...]]:
    """Rename the last layers, which attend, to MTP layers with names apart from the decoder's."""
    layers, num_mtp = architecture.num_hidden_layers, architecture.num_nextn_predict_layers
    prefix, width = f"{family_of(architecture).text_prefix}layers.", architecture.hidden_size
    spelled = {f"{prefix}{layers + i}.": f"{apart}layers.{i}." for i in range(num_mtp)}
    renamed = {}
    for name, shape in shapes.items():
        layer = name[: name.find(".", len(prefix)) + 1]
        renamed[spelled.get(layer, layer) + name.removeprefix(layer)] = shape
    if num_mtp:
        renamed |= {f"{apart}{n}.weight": (width,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        renamed[f"{apart}fc.weight"] = (width, 2 * width)
    return renamed


def _per_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """transformers stacks the experts of a layer; the Hub has three tensors for each."""
    if name.endswith("experts.gate_up_proj"):
        experts, double, width = shape
        prefix = name.removesuffix("gate_up_proj")
        parts = [f"{prefix}{e}.{part}.weight" for e in range(experts) for part in ("gate_proj", "up_proj")]
        return dict.fromkeys(parts, (double // 2, width))
    if name.endswith("experts.down_proj"):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
    return {name: shape}


def _transformers_model(architecture: Architecture, num_layers: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if architecture.vision.depth else AutoModelForCausalLM
    return auto.from_config(transformers_config(architecture, num_layers))


def transformers_config(architecture: Architecture, num_layers: int) -> PretrainedConfig:
    """Return transformers' configuration of the model with another number of layers."""
    from transformers import AutoConfig

    values = dimensions(architecture) | {"num_hidden_layers": num_layers}
    model_type = values.pop("model_type")
    vision = values.pop("vision", None)
    scaling = values.pop("rope_scaling", None)
    rope = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    if scaling:
        rope |= {**scaling, "rope_type": "yarn"}
    if architecture.kv_lora_rank and not architecture.q_lora_rank:
        values["q_lora_rank"] = None
    if "partial_rotary_factor" in values:
        rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    if model_type in ("qwen3_moe", "qwen3_5_moe"):
        values["num_experts"] = values.pop("n_routed_experts")
    if architecture.kv_lora_rank:
        values["num_key_value_heads"] = architecture.num_attention_heads
    if architecture.full_attention_interval:
        interval, num_mtp = values.pop("full_attention_interval"), values.pop("num_nextn_predict_layers", 0)
        decoder = architecture.num_hidden_layers
        attends = [layer >= decoder or (layer + 1) % interval == 0 for layer in range(num_layers)]
        values["layer_types"] = ["full_attention" if full else "linear_attention" for full in attends]
        values["mtp_num_hidden_layers"] = num_mtp
    if architecture.n_routed_experts:
        values["norm_topk_prob"] = True
    if architecture.routed_scaling_factor:
        values = {"n_group": 1, "topk_group": 1, **values}
    common = {"rope_parameters": rope, "dtype": "bfloat16", "eos_token_id": 1, "pad_token_id": 1}
    if vision:
        values |= common
        parts = {"text_config": values, "vision_config": {**vision, "out_hidden_size": architecture.hidden_size}}
        tied = {"tie_word_embeddings": architecture.tie_word_embeddings, "dtype": "bfloat16"}
        return AutoConfig.for_model(model_type, architectures=[family_of(architecture).hub_class], **parts, **tied)
    return AutoConfig.for_model(model_type, architectures=[family_of(architecture).hub_class], **values, **common)

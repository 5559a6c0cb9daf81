"""The dimensions of each architecture family: required, optional, and no others.

    glm_moe_dsa   MLA, DSA indexer in all layers or some, sigmoid router with bias, MTP layer  GLM-5, GLM-5.1, 5.2
    deepseek_v3   the same without indexer, q-LoRA optional, YaRN, groups of experts           DeepSeek-V3, Moonlight
    deepseek_v32  deepseek_v3 with GLM-5's DSA indexer, whose rotation differs                 DeepSeek-V3.2
    glm4_moe      GQA with bias and partly rotated heads, QK norm or not, router as above      GLM-4.5 and 4.7, Air
    qwen3         GQA with QK norm, dense MLPs, embedding tied or not                          Qwen3
    qwen3_moe     GQA with QK norm, softmax router without bias, no shared expert              Qwen3-30B-A3B
    qwen3_5       gated delta nets, each fourth layer GQA with QK norm and output gate,        Qwen3.5-0.8B to 27B
                  norms around 1, dense MLPs, vision tower, MTP layer
    qwen3_5_moe   the same with experts and a gated shared expert                              Qwen3.5-35B-A3B to 397B

Sources: the configuration and modelling files of each family in huggingface/transformers, src/transformers/models/.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.schema import Architecture
from posttrain.errors import Problem

PREFIX = "model.architecture"
# Several times the largest values of released models.
MOST_LAYERS, MOST_EXPERTS = 500, 2048
_COMMON = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)
_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_GQA = ("num_key_value_heads", "head_dim")
_MLP = ("intermediate_size",)
_INDEXER = ("q_lora_rank", "index_n_heads", "index_head_dim", "index_topk")
_EXPERTS = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
_GLM_EXPERTS = (*_EXPERTS, "routed_scaling_factor")
_GLM_COUNTS = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")
_SHARED_INDEXER = ("index_topk_freq", "index_skip_topk_offset")
_DELTA_NET = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval", "partial_rotary_factor"),
)
_DEEPSEEK = ("q_lora_rank", "n_group", "topk_group", "rope_scaling")


@dataclass(frozen=True)
class Family:
    """The architecture of models of one `model_type`.

    Args:
        hub_class: Class of transformers, named in `architectures` of config.json.
        needs: Required dimensions.
        may: Optional dimensions, whose default is also valid.
        router_bias: The router has a correction bias per expert.
        always_qk_norm: Queries and keys are normalised in every model of the family.
        indexer_interleaved: The indexer rotates pairs of neighbours instead of halves.
        zero_centered_norms: The weight of a norm is its distance from 1, except in gated delta nets.
        gated_attention: Attention's output is multiplied by a gate that the query projection yields, too.
        text_prefix: Start of the decoder's tensor names on the Hub.
        mtp_prefix: The same of MTP layers; empty if they are numbered after the decoder's layers.
        fp32_names: Parts of the names of tensors that are published in FP32.
    """

    hub_class: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    router_bias: bool = False
    always_qk_norm: bool = False
    indexer_interleaved: bool = True
    zero_centered_norms: bool = False
    gated_attention: bool = False
    text_prefix: str = "model."
    mtp_prefix: str = ""
    fp32_names: tuple[str, ...] = ()

    @property
    def text_class(self) -> str:
        """The class of transformers that computes texts alone, without the vision tower, if the family has one."""
        return self.hub_class.replace("ForConditionalGeneration", "ForCausalLM")


_QWEN3_5 = functools.partial(
    Family,
    may=("tie_word_embeddings", "num_nextn_predict_layers", "vision"),
    always_qk_norm=True,
    zero_centered_norms=True,
    gated_attention=True,
    text_prefix="model.language_model.",
    mtp_prefix="mtp.",
    fp32_names=("linear_attn.A_log", "linear_attn.norm."),
)
FAMILIES = {
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        (*_MLP, *_MLA, *_INDEXER, *_GLM_EXPERTS),
        (*_GLM_COUNTS, *_SHARED_INDEXER),
        router_bias=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", (*_MLP, *_MLA, *_GLM_EXPERTS), (*_GLM_COUNTS, *_DEEPSEEK), router_bias=True
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        (*_MLP, *_MLA, *_INDEXER, *_GLM_EXPERTS),
        (*_GLM_COUNTS, *_DEEPSEEK),
        router_bias=True,
        indexer_interleaved=False,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (*_MLP, *_GQA, *_GLM_EXPERTS, "partial_rotary_factor"),
        (*_GLM_COUNTS, "attention_bias", "use_qk_norm"),
        router_bias=True,
    ),
    "qwen3": Family("Qwen3ForCausalLM", (*_MLP, *_GQA), ("tie_word_embeddings",), always_qk_norm=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", (*_MLP, *_GQA, *_EXPERTS), ("tie_word_embeddings",), always_qk_norm=True
    ),
    "qwen3_5": _QWEN3_5("Qwen3_5ForConditionalGeneration", (*_MLP, *_GQA, *_DELTA_NET)),
    "qwen3_5_moe": _QWEN3_5(
        "Qwen3_5MoeForConditionalGeneration", (*_GQA, *_DELTA_NET, *_EXPERTS, "shared_expert_intermediate_size")
    ),
}


def family_of(arch: Architecture) -> Family:
    """Return the family of a model."""
    return FAMILIES[arch.model_type]


def modelling_module(model_type: str) -> str:
    """Return the module of transformers with the family's `hub_class`."""
    return f"transformers.models.{model_type}.modeling_{model_type}"


def dimensions(arch: Architecture) -> dict[str, Any]:
    """Return the dimensions that the model's family has, in the schema's order.

    Names of runs and generated checkpoints depend on them, so a dimension that another family gets later changes no
    name, nor does one whose value is declared `unnamed`.
    """
    family = family_of(arch)
    known = {*_COMMON, *family.needs, *family.may}
    unnamed = {f.name for f in dataclasses.fields(arch) if f.metadata.get("unnamed", ...) == getattr(arch, f.name)}
    return {name: value for name, value in dataclasses.asdict(arch).items() if name in known - unnamed}


def is_delta_net(arch: Architecture, layer: int) -> bool:
    """Return whether a decoder layer is a gated delta net; MTP layers, numbered after them, attend."""
    interval = arch.full_attention_interval
    return interval > 0 and layer < arch.num_hidden_layers and (layer + 1) % interval != 0


@functools.lru_cache(maxsize=256)
def num_attention_layers(arch: Architecture) -> int:
    """Return the number of decoder layers that attend, and so have a KV cache."""
    return sum(not is_delta_net(arch, layer) for layer in range(arch.num_hidden_layers))


def chooses_keys(arch: Architecture, layer: int) -> bool:
    """Return whether a layer has an indexer; a sparse model's layer without one reuses an earlier layer's selection.

    MTP layers, which are numbered after the decoder's, have their own.
    """
    if layer >= arch.num_hidden_layers:
        return arch.index_n_heads > 0
    behind = max(layer + 1 - arch.index_skip_topk_offset, 0)
    return arch.index_n_heads > 0 and behind % arch.index_topk_freq == 0


@functools.lru_cache(maxsize=256)
def num_indexers(arch: Architecture) -> int:
    """Return the number of decoder layers with an indexer."""
    return sum(chooses_keys(arch, layer) for layer in range(arch.num_hidden_layers))


def shared_experts_width(arch: Architecture) -> int:
    """Return the width of all shared experts of a layer together."""
    return arch.shared_expert_intermediate_size or arch.n_shared_experts * arch.moe_intermediate_size


def check_architecture(arch: Architecture) -> Iterator[Problem]:
    """Yield missing, unexpected and inconsistent dimensions."""
    yield from _check_size(arch)
    yield from _check_presence(arch)
    yield from _check_indexer(arch)
    yield from _check_positions(arch)
    yield from _check_heads(arch)
    yield from _check_vision(arch)
    yield from _check_experts(arch)
    yield from _check_delta_net(arch)


def _check_size(arch: Architecture) -> Iterator[Problem]:
    """Limit counts to plausible models, because tensor names are generated for each."""
    layers = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), MOST_LAYERS)
    for name, most in {**layers, "n_routed_experts": MOST_EXPERTS}.items():
        if not 0 <= (found := getattr(arch, name)) <= most:
            remedy = "take it from the model's config.json"
            yield Problem("dimension-out-of-range", f"{PREFIX}.{name}", repr(found), f"0 to {most:,}", remedy)


def _check_presence(arch: Architecture) -> Iterator[Problem]:
    family = family_of(arch)
    for field in dataclasses.fields(arch):
        name, value = field.name, getattr(arch, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if name in family.needs and value == default:
            allowed = f"a value above 0, which {arch.model_type} needs"
            yield Problem("dimension-missing", f"{PREFIX}.{name}", repr(value), allowed, "take it from config.json")
        elif name not in (*_COMMON, *family.needs, *family.may) and value != default:
            allowed = f"left out: {arch.model_type} has no such part"
            remedy = "remove it, or correct model_type"
            yield Problem("dimension-of-another-family", f"{PREFIX}.{name}", repr(value), allowed, remedy)


def _check_indexer(arch: Architecture) -> Iterator[Problem]:
    if 0 < arch.index_head_dim < arch.qk_rope_head_dim:
        value, allowed = str(arch.index_head_dim), f"at least {arch.qk_rope_head_dim} (qk_rope_head_dim)"
        yield Problem(
            "indexer-narrower-than-rope", f"{PREFIX}.index_head_dim", value, allowed, "take both from config.json"
        )
    if arch.index_topk_freq > 1 and not arch.index_skip_topk_offset:
        allowed = "at least 1 with index_topk_freq: no layer comes before the first whose keys it could share"
        yield Problem(
            "first-layer-shares-indices", f"{PREFIX}.index_skip_topk_offset", "0", allowed, "take both from config.json"
        )


def _check_positions(arch: Architecture) -> Iterator[Problem]:
    scaling, key = arch.rope_scaling, f"{PREFIX}.rope_scaling"
    if scaling.factor > 1 and not scaling.original_max_position_embeddings:
        allowed = "a value above 0, which a factor needs"
        remedy = "take it from config.json"
        yield Problem("yarn-without-original-length", f"{key}.original_max_position_embeddings", "0", allowed, remedy)
    if scaling.mscale != 1 and not scaling.mscale_all_dim:
        allowed = "1 without mscale_all_dim: readers of config.json ignore any other value"
        yield Problem("mscale-alone", f"{key}.mscale", f"{scaling.mscale:g}", allowed, "take both from config.json")


def _check_heads(arch: Architecture) -> Iterator[Problem]:
    groups, heads = arch.num_key_value_heads, arch.num_attention_heads
    if groups and heads % groups:
        allowed = f"a divisor of {heads} (num_attention_heads)"
        yield Problem(
            "kv-heads-divide-heads", f"{PREFIX}.num_key_value_heads", str(groups), allowed, "take both from config.json"
        )
    rotated = {
        "qk_rope_head_dim": arch.qk_rope_head_dim,
        "head_dim": arch.head_dim * (arch.partial_rotary_factor or 1),
    }
    for name, width in rotated.items():
        if width % 2:
            allowed = "an even rotary width: RoPE rotates pairs of dimensions"
            yield Problem(
                "rope-width-odd", f"{PREFIX}.{name}", f"{width:g} rotated", allowed, "take it from config.json"
            )


def _check_vision(arch: Architecture) -> Iterator[Problem]:
    family = family_of(arch)
    if "vision" not in (*family.needs, *family.may):
        return
    for name, value in dataclasses.asdict(arch.vision).items():
        if not value:
            allowed = f"a value above 0: each {arch.model_type} has a vision tower, which training leaves as it is"
            remedy = "take it from vision_config of config.json; the text model alone is not supported"
            yield Problem("dimension-missing", f"{PREFIX}.vision.{name}", str(value), allowed, remedy)
    if arch.vision.num_heads and arch.vision.hidden_size % arch.vision.num_heads:
        allowed, remedy = f"a divisor of {arch.vision.hidden_size} (hidden_size)", "take both from vision_config"
        yield Problem(
            "vision-heads-divide-width", f"{PREFIX}.vision.num_heads", str(arch.vision.num_heads), allowed, remedy
        )


def _check_experts(arch: Architecture) -> Iterator[Problem]:
    if arch.num_experts_per_tok == 1 and not family_of(arch).router_bias:
        allowed = "at least 2: Megatron Core has no softmax over a single chosen expert"
        yield Problem("one-expert-per-token", f"{PREFIX}.num_experts_per_tok", "1", allowed, "choose another model")
    if arch.num_experts_per_tok > arch.n_routed_experts > 0:
        value, allowed = str(arch.num_experts_per_tok), f"at most {arch.n_routed_experts} (n_routed_experts)"
        yield Problem(
            "more-experts-than-exist", f"{PREFIX}.num_experts_per_tok", value, allowed, "take both from config.json"
        )
    if arch.first_k_dense_replace > arch.num_hidden_layers:
        value, allowed = str(arch.first_k_dense_replace), f"at most {arch.num_hidden_layers} (num_hidden_layers)"
        remedy = "take both from config.json"
        yield Problem("more-dense-layers-than-layers", f"{PREFIX}.first_k_dense_replace", value, allowed, remedy)
    if arch.n_routed_experts % arch.n_group:
        allowed = f"a divisor of {arch.n_routed_experts} (n_routed_experts)"
        yield Problem(
            "groups-divide-experts", f"{PREFIX}.n_group", str(arch.n_group), allowed, "take both from config.json"
        )
    elif arch.topk_group > arch.n_group:
        allowed = f"at most {arch.n_group} (n_group)"
        remedy = "take both from config.json"
        yield Problem("more-groups-than-exist", f"{PREFIX}.topk_group", str(arch.topk_group), allowed, remedy)
    elif arch.n_routed_experts >= arch.num_experts_per_tok > arch.topk_group * (arch.n_routed_experts // arch.n_group):
        allowed = f"enough groups for {arch.num_experts_per_tok} experts (num_experts_per_tok)"
        yield Problem(
            "groups-too-small", f"{PREFIX}.topk_group", str(arch.topk_group), allowed, "take both from config.json"
        )


def _check_delta_net(arch: Architecture) -> Iterator[Problem]:
    keys, values = arch.linear_num_key_heads, arch.linear_num_value_heads
    if keys and values % keys:
        allowed, remedy = f"a multiple of {keys} (linear_num_key_heads)", "take both from config.json"
        yield Problem("value-heads-share-keys", f"{PREFIX}.linear_num_value_heads", str(values), allowed, remedy)
    interval, layers = arch.full_attention_interval, arch.num_hidden_layers
    if interval and not 1 < interval <= layers:
        remedy = "take both from config.json"
        allowed = f"2 to {layers} (num_hidden_layers): each n-th layer attends, and the others do not"
        yield Problem(
            "no-delta-net-or-no-attention", f"{PREFIX}.full_attention_interval", str(interval), allowed, remedy
        )
    if family_of(arch).mtp_prefix and arch.num_nextn_predict_layers > 1:
        value, remedy = str(arch.num_nextn_predict_layers), "take it from config.json"
        allowed = "0 or 1: several layers would share one projection and its norms"
        yield Problem("mtp-layers-share-projection", f"{PREFIX}.num_nextn_predict_layers", value, allowed, remedy)

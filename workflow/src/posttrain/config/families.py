"""Which dimensions each architecture family has: what must be set, what may be, and that nothing else is.

    glm_moe_dsa   MLA, DSA indexer, sigmoid router with bias, shared expert, MTP layer        GLM-5, GLM-5.1
    deepseek_v3   the same without indexer                                                     DeepSeek-V3
    glm4_moe      GQA with bias and partly rotated heads, QK norm or not, router as above      GLM-4.5 and 4.7, Air
    qwen3         GQA with QK norm, dense MLPs, embedding tied or not                          Qwen3
    qwen3_moe     GQA with QK norm, softmax router without bias, no shared expert              Qwen3-30B-A3B

Sources: the configuration and modelling files of each family in huggingface/transformers, src/transformers/models/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.schema import Architecture
from posttrain.errors import Problem

PREFIX = "model.architecture"
_COMMON = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_GQA = ("num_key_value_heads", "head_dim")
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")
_EXPERTS = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
_GLM_EXPERTS = (*_EXPERTS, "routed_scaling_factor")
_GLM_COUNTS = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")


@dataclass(frozen=True)
class Family:
    """What models of one `model_type` are made of.

    Args:
        needs: Dimensions that must be set.
        may: Dimensions that have a meaning when left at their default, too.
        router_bias: The router has a bias per expert that corrects the choice.
        always_qk_norm: Queries and keys are normalised in every model of the family.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    router_bias: bool = False
    always_qk_norm: bool = False


FAMILIES = {
    "glm_moe_dsa": Family((*_MLA, *_INDEXER, *_GLM_EXPERTS), _GLM_COUNTS, router_bias=True),
    "deepseek_v3": Family((*_MLA, *_GLM_EXPERTS), _GLM_COUNTS, router_bias=True),
    "glm4_moe": Family(
        (*_GQA, *_GLM_EXPERTS, "partial_rotary_factor"),
        (*_GLM_COUNTS, "attention_bias", "use_qk_norm"),
        router_bias=True,
    ),
    "qwen3": Family(_GQA, ("tie_word_embeddings",), always_qk_norm=True),
    "qwen3_moe": Family((*_GQA, *_EXPERTS), ("tie_word_embeddings",), always_qk_norm=True),
}


def family_of(arch: Architecture) -> Family:
    """Return the family of a model."""
    return FAMILIES[arch.model_type]


def dimensions(arch: Architecture) -> dict[str, Any]:
    """Return the dimensions that the model's family has, in the schema's order.

    It is what names runs and made checkpoints: a dimension that another family gets later changes no name.
    """
    family = family_of(arch)
    known = {*_COMMON, *family.needs, *family.may}
    return {name: value for name, value in dataclasses.asdict(arch).items() if name in known}


def check_architecture(arch: Architecture) -> Iterator[Problem]:
    """Yield what is missing, what is too much, and what does not fit together."""
    yield from _check_presence(arch)
    yield from _check_indexer(arch)
    yield from _check_heads(arch)
    yield from _check_experts(arch)


def _check_presence(arch: Architecture) -> Iterator[Problem]:
    family = family_of(arch)
    for field in dataclasses.fields(arch):
        name, value = field.name, getattr(arch, field.name)
        if name in family.needs and value == field.default:
            allowed = f"a value above 0, which {arch.model_type} needs"
            yield Problem(f"{PREFIX}.{name}", repr(value), allowed, "take it from config.json")
        elif name not in (*_COMMON, *family.needs, *family.may) and value != field.default:
            allowed = f"left out: {arch.model_type} has no such part"
            yield Problem(f"{PREFIX}.{name}", repr(value), allowed, "remove it, or correct model_type")


def _check_indexer(arch: Architecture) -> Iterator[Problem]:
    if 0 < arch.index_head_dim < arch.qk_rope_head_dim:
        value, allowed = str(arch.index_head_dim), f"at least {arch.qk_rope_head_dim} (qk_rope_head_dim)"
        yield Problem(f"{PREFIX}.index_head_dim", value, allowed, "take both from config.json")


def _check_heads(arch: Architecture) -> Iterator[Problem]:
    groups, heads = arch.num_key_value_heads, arch.num_attention_heads
    if groups and heads % groups:
        allowed = f"a divisor of {heads} (num_attention_heads)"
        yield Problem(f"{PREFIX}.num_key_value_heads", str(groups), allowed, "take both from config.json")
    rotated = {
        "qk_rope_head_dim": arch.qk_rope_head_dim,
        "head_dim": arch.head_dim * (arch.partial_rotary_factor or 1),
    }
    for name, width in rotated.items():
        if width % 2:
            allowed = "an even rotated width: positions turn pairs of numbers"
            yield Problem(f"{PREFIX}.{name}", f"{width:g} rotated", allowed, "take it from config.json")


def _check_experts(arch: Architecture) -> Iterator[Problem]:
    if arch.num_experts_per_tok > arch.n_routed_experts > 0:
        value, allowed = str(arch.num_experts_per_tok), f"at most {arch.n_routed_experts} (n_routed_experts)"
        yield Problem(f"{PREFIX}.num_experts_per_tok", value, allowed, "take both from config.json")
    if arch.first_k_dense_replace > arch.num_hidden_layers:
        value, allowed = str(arch.first_k_dense_replace), f"at most {arch.num_hidden_layers} (num_hidden_layers)"
        yield Problem(f"{PREFIX}.first_k_dense_replace", value, allowed, "take both from config.json")

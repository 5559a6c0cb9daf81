"""Checks that a checkpoint is the model that the configuration describes.

Finding a wrong dimension here takes a second; finding it in an engine or the trainer takes the start of a whole job. So
`check_config` compares all of `model.architecture` with `config.json` and the shards' headers, and reports all
differences at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from posttrain.checkpoint.formats.as_transformers import check_meaning, hub_config
from posttrain.checkpoint.formats.config_patch import PATCH_FILE
from posttrain.checkpoint.formats.config_sections import (
    CONFIG,
    TEXT,
    VISION,
    check_sections,
    has_sections,
    in_section,
    sections,
    text_section,
)
from posttrain.checkpoint.formats.safetensors_io import TensorInfo, TensorSpec
from posttrain.checkpoint.param_names import compare_tensors, mtp_layer_of
from posttrain.config.families import chooses_keys, dimensions, family_of, is_delta_net
from posttrain.config.schema import Architecture, RopeScaling
from posttrain.errors import Problem, one_line

ALIAS_TYPE, ALIAS_CLASS = "deepseek_v32", "DeepseekV32ForCausalLM"
TOKENIZER_CONFIG = "tokenizer_config.json"
# About a terminal's height; with another model, all tensors differ.
MAX_TENSOR_LINES = 20
# Compared separately, because config.json has several spellings of them.
_SPELLED_APART = (
    *("model_type", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    *("index_topk_freq", "index_skip_topk_offset", "full_attention_interval", "vision"),
)
# transformers creates a name for each label, even if the model has no use for labels.
_MOST_LABELS, _MOST_KEYS = 1000, 1000
# Keys that choose the implementation of attention or experts.
_IMPLEMENTATION = ("_implementation", "_implementation_internal")
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_EXPERT_COUNTS = {"n_routed_experts", "num_experts", "num_local_experts"}
_ROPE_WORDS = {"rope_type", *(field.name for field in dataclasses.fields(RopeScaling))}
# Values that transformers derives from others if the file lacks them.
_CONSEQUENCES = (CONFIG, "qk_head_dim", "head_dim", "mlp_layer_types", "layer_types", "indexer_types")
# Each of two keys for one thing is the other's consequence.
_LAYER_KINDS = {"full_attention_interval", "layer_types"}
# Other names of our dimensions: on the Hub, and as written by transformers 5.
OTHER_SPELLINGS = {"n_routed_experts": ("num_experts", "num_local_experts"), MTP_COUNTS[0]: MTP_COUNTS[1:]}

# Of Qwen3.5. transformers reads none of them; engines do.
_GATED = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
}


# ---- the check ----


def check_config(
    config: Mapping[str, Any],
    architecture: Architecture,
    tensors: Mapping[str, TensorSpec | TensorInfo],
) -> list[Problem]:
    """Compare a checkpoint with the configured architecture.

    Args:
        config: Content of `config.json`.
        architecture: The configured architecture.
        tensors: Name -> dtype and shape, from the shards' headers (`resaved_weights.published_specs`).

    Returns:
        All differences; empty if the checkpoint is the described model, unquantised and unpatched.
    """
    lacking = list(check_sections(config, architecture))
    text = text_section(config) if not any(problem.code == "section-missing" for problem in lacking) else None
    problems = [
        *_check_kind(config, architecture),
        *_check_precision(config),
        *lacking,
        *_check_harmless(config, architecture),
        *(in_section(config, _check_text(text, architecture, tensors)) if text is not None else ()),
    ]
    return [*problems, *_check_meaning(config, architecture, problems), *_check_tensors(architecture, tensors)]


def _check_text(
    text: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, TensorSpec | TensorInfo]
) -> Iterator[Problem]:
    """Check the language model's values."""
    yield from _check_dimensions(text, architecture, tensors)
    yield from _check_rope(text, architecture)
    yield from _check_fixed(text, architecture)
    yield from _check_layers(text, architecture)
    yield from _check_indexers(text, architecture)


def _check_kind(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    model_type, classes = config.get("model_type"), config.get("architectures")
    is_alias = architecture.model_type != ALIAS_TYPE
    if is_alias and (model_type == ALIAS_TYPE or classes == [ALIAS_CLASS]):
        value = f"{model_type!r} with architectures {classes!r}"
        remedy = f"it is patched already: give the original (a folder with {PATCH_FILE} keeps the way back)"
        yield Problem(
            "already-patched", f"{CONFIG}: model_type", value, f"{architecture.model_type!r}, unpatched", remedy
        )
    else:
        yield from _compare("model_type", model_type, architecture.model_type)
        yield from _compare("architectures", classes, [family_of(architecture).hub_class])


def _check_precision(config: Mapping[str, Any]) -> Iterator[Problem]:
    found = {name: section.get("dtype", section.get("torch_dtype")) for name, section in sections(config)}
    # Published files with sections say it in that of the language model alone.
    said = {name: dtype for name, dtype in found.items() if dtype is not None} or {"": None}
    for name, dtype in said.items():
        if dtype != "bfloat16":
            key = f"{CONFIG}: {name}.dtype" if name else f"{CONFIG}: dtype"
            yield Problem("dtype-not-bf16", key, repr(dtype), "'bfloat16'", "give the BF16 checkpoint")
    if quantization := next((part["quantization_config"] for _, part in sections(config) if _is_quantized(part)), None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        remedy = (
            "it is quantised already: give the BF16 checkpoint, or make it (`snakemake finalize_bf16`, "
            "docs/checkpoints.md) and name its folder with model.source.kind=folder and model.source.folder"
        )
        yield Problem("already-quantized", f"{CONFIG}: quantization_config", f"quant_method {method!r}", "none", remedy)


def _is_quantized(section: Mapping[str, Any]) -> bool:
    return bool(section.get("quantization_config"))


def lost_mtp_layers(
    config: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, TensorSpec | TensorInfo]
) -> dict[str, Any]:
    """Return the keys by which config.json counts MTP layers that the weights lack, with the number of each.

    Some trainers drop the layers and keep the number. With `num_nextn_predict_layers: 0` in the model's file such a
    checkpoint is accepted, and its patched copy has 0, too. A key of a section is "text_config/KEY".
    """
    is_lost = not architecture.num_nextn_predict_layers and not any(mtp_layer_of(architecture, n) for n in tensors)
    text = text_section(config)
    place = "" if text is config else f"{TEXT}/"
    return {f"{place}{key}": text[key] for key in MTP_COUNTS if is_lost and text.get(key)}


def _check_dimensions(
    config: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, TensorSpec | TensorInfo]
) -> Iterator[Problem]:
    lost = lost_mtp_layers(config, architecture, tensors)
    for name, expected in dimensions(architecture).items():
        key = next((spelling for spelling in (name, *OTHER_SPELLINGS.get(name, ())) if spelling in config), name)
        # Parts that the model lacks (indexer, MTP layer) may be omitted.
        if name not in _SPELLED_APART and key not in lost and not (expected == 0 and config.get(key) is None):
            yield from _compare(key, config.get(key), expected)


def _check_harmless(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Reject values that make transformers allocate without bound, run remote code, or fail in training."""
    for name, section in sections(config):
        yield from _check_harmless_section(f"{CONFIG}: {name}." if name else f"{CONFIG}: ", section, architecture)


def _check_harmless_section(place: str, config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    if len(config) > _MOST_KEYS:
        remedy = "give the file that the model came with"
        yield Problem("config-too-large", CONFIG, f"{len(config):,} keys", f"at most {_MOST_KEYS:,}", remedy)
    labels = config.get("num_labels")
    if labels is not None and not (isinstance(labels, int) and labels <= _MOST_LABELS):
        remedy = "remove the key: a language model has no labels"
        allowed = f"a number up to {_MOST_LABELS:,}, or none"
        yield Problem("too-many-labels", f"{place}num_labels", repr(labels), allowed, remedy)
    for key, value in config.items():
        if key.endswith(_IMPLEMENTATION) and not (value is None or re.fullmatch(r"\w+", str(value))):
            allowed = "a word such as sdpa; a repository's name has its code downloaded and run"
            yield Problem("key-runs-code", f"{place}{key}", one_line(repr(value)), allowed, "remove the key")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        wrong = [id for id in (ids if isinstance(ids, list) else [ids]) if id is not None]
        wrong = [id for id in wrong if not (isinstance(id, int) and id < architecture.vocab_size)]
        if wrong:
            allowed = f"token ids below {architecture.vocab_size} (vocab_size)"
            remedy = "give the file that the model came with"
            yield Problem("token-id-outside-vocabulary", f"{place}{key}", one_line(repr(ids)), allowed, remedy)


def _check_rope(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Check rotary embeddings: older versions' `rope_scaling` overrides `rope_parameters` of transformers 5."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    expected_kind = "yarn" if architecture.rope_scaling.factor > 1 else "default"
    if kind != expected_kind:
        remedy = "correct model.architecture.rope_scaling in the model's file; no scaling but YaRN is supported"
        yield Problem("rope-type-differs", f"{CONFIG}: rope_type", repr(kind), repr(expected_kind), remedy)
    elif kind == "yarn":
        yield from _check_yarn(parameters, architecture.rope_scaling)
    expected = {"rope_theta": architecture.rope_theta}
    if architecture.partial_rotary_factor:
        expected["partial_rotary_factor"] = architecture.partial_rotary_factor
    for key, value in expected.items():
        # Readers differ on which of two places they read, so both must agree.
        said = [found for found in (parameters.get(key), config.get(key)) if found is not None]
        for found in [found for place, found in enumerate(said) if found not in said[:place]] or [None]:
            yield from _compare(key, found, value)


def _check_yarn(parameters: Mapping[str, Any], scaling: RopeScaling) -> Iterator[Problem]:
    """Check YaRN's numbers; a missing one has transformers' default, which is the schema's."""
    defaults = dataclasses.asdict(RopeScaling())
    for name, expected in dataclasses.asdict(scaling).items():
        found = parameters.get(name)
        yield from _compare(f"rope_scaling.{name}", defaults[name] if found is None else found, expected)
    for name, allowed in (("attention_factor", None), ("truncate", True)):
        if parameters.get(name, allowed) != allowed:
            value = repr(parameters[name])
            yield Problem(
                "rope-variant", f"{CONFIG}: rope_scaling.{name}", value, repr(allowed), "this variant is not supported"
            )


def _check_fixed(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Check values that trainer and engines assume and that no key of ours sets, if `config.json` has them."""
    for key, expected in fixed_values(architecture).items():
        found = config.get(key, expected)
        # A missing value has the family's default; null disables a value that is on by default.
        if found != expected and (found is not None or expected is True):
            yield Problem(
                "model-variant", f"{CONFIG}: {key}", repr(found), repr(expected), "this variant is not supported"
            )


def _check_layers(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Check the interval of layers that attend; `layer_types`, which wins in transformers, is a fixed value."""
    if architecture.full_attention_interval and "full_attention_interval" in config:
        found = config["full_attention_interval"]
        yield from _compare("full_attention_interval", found, architecture.full_attention_interval)


def _check_indexers(config: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Check that all three ways to mark layers with an indexer agree: readers use different ones."""
    if not (layers := architecture.index_n_heads and architecture.num_hidden_layers):
        return
    chooses = [chooses_keys(architecture, layer) for layer in range(layers)]
    types, letters = (["full" if own else "shared" for own in chooses], "".join("SF"[own] for own in chooses))
    for key, allowed in (("indexer_types", [types]), ("index_topk_pattern", [letters, types])):
        if (found := config.get(key)) is not None and found not in allowed:
            remedy = "correct index_topk_freq and index_skip_topk_offset of model.architecture in the model's file"
            yield Problem(
                "indexers-differ", f"{CONFIG}: {key}", repr(found), f"{allowed[0]!r} (model.architecture)", remedy
            )
    if all(config.get(key) is None for key in ("indexer_types", "index_topk_pattern")) or "index_topk_freq" in config:
        yield from _compare("index_topk_freq", config.get("index_topk_freq") or 1, architecture.index_topk_freq)
        if architecture.index_topk_freq > 1:
            offset = config.get("index_skip_topk_offset")
            yield from _compare("index_skip_topk_offset", offset, architecture.index_skip_topk_offset)


def fixed_values(architecture: Architecture) -> dict[str, Any]:
    """Return fixed values: those that config.json has, or the family implies, and no key of ours sets."""
    layers, dense = architecture.num_hidden_layers, architecture.first_k_dense_replace
    fixed = {
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
    }
    if architecture.kv_lora_rank:
        fixed |= {
            "num_key_value_heads": architecture.num_attention_heads,
            "qk_head_dim": architecture.qk_nope_head_dim + architecture.qk_rope_head_dim,
        }
    else:
        kinds = ("full_attention", "linear_attention")
        fixed["layer_types"] = [kinds[is_delta_net(architecture, layer)] for layer in range(layers)]
    if family_of(architecture).gated_attention:
        fixed |= _GATED
    if architecture.index_n_heads:
        fixed["indexer_rope_interleave"] = family_of(architecture).indexer_interleaved
    return {key: value for key, value in fixed.items() if key not in dimensions(architecture)}


def _check_meaning(
    config: Mapping[str, Any], architecture: Architecture, known: Sequence[Problem]
) -> Iterator[Problem]:
    """Yield problems that only transformers' parsing of the file shows, except consequences of known problems."""
    named = {_last_word(problem.key) for problem in known}
    if named & {"model_type", "architectures", CONFIG, TEXT, VISION}:
        return
    consequences = {*named, *_CONSEQUENCES} if named else set()
    for alike in (_EXPERT_COUNTS, _LAYER_KINDS):
        consequences |= alike if named & alike else set()
    fixed = fixed_values(architecture)
    written = hub_config(architecture, fixed)
    read = _readable(config, written, fixed.keys(), named)
    for section in (TEXT, VISION) if has_sections(architecture) else ():
        read[section] = _readable(config[section], written[section], fixed.keys(), named)
    for problem in check_meaning(read, written, architecture):
        is_of_rope = "rope_parameters." in problem.key
        if _last_word(problem.key) not in consequences and not (is_of_rope and named & _ROPE_WORDS):
            yield problem


def _readable(
    section: Mapping[str, Any], written: Mapping[str, Any], fixed: Collection[str], named: Collection[str]
) -> dict[str, Any]:
    """Return what transformers is to parse.

    A null that `_check_fixed` accepts equals a missing key. Values known to be wrong are not passed to transformers,
    which would list a billion layers.
    """
    read = {key: value for key, value in section.items() if (value is not None or key not in fixed)}
    return {key: value for key, value in read.items() if key not in named} | {
        key: written[key] for key in written if key in named
    }


def _last_word(key: str) -> str:
    return key if key == CONFIG else key.replace(":", ".").split(".")[-1].strip()


def _check_tensors(architecture: Architecture, tensors: Mapping[str, TensorSpec | TensorInfo]) -> Iterator[Problem]:
    found = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if not (lines := compare_tensors(architecture, found)):
        return
    remedy = "give a complete checkpoint, or correct model.architecture"
    if architecture.num_nextn_predict_layers and all(mtp_layer_of(architecture, line) for line in lines):
        remedy = (
            "if they were dropped on purpose, set model.architecture.num_nextn_predict_layers to 0; nothing drafts then"
        )
    shown = "\n        ".join(lines[:MAX_TENSOR_LINES])
    more = f"\n        and {len(lines) - MAX_TENSOR_LINES} more" if len(lines) > MAX_TENSOR_LINES else ""
    value = f"{len(lines)} are not as model.architecture says:\n        {shown}{more}"
    allowed = "every tensor of the architecture, in its shape and dtype"
    yield Problem("tensors-differ", "tensors", value, allowed, remedy)


def _compare(key: str, found: Any, expected: Any) -> Iterator[Problem]:
    if found != expected or isinstance(found, bool) != isinstance(expected, bool):
        value = "(missing)" if found is None else repr(found)
        remedy = "correct model.architecture in the model's file, or give the checkpoint it describes"
        yield Problem("architecture-differs", f"{CONFIG}: {key}", value, f"{expected!r} (model.architecture)", remedy)

"""The values of a `config.json` with which transformers' model computes.

A missing key takes the default of the family's configuration class, which may differ from the published models' value.
A key may be present twice, or under another name. So that class parses both the checkpoint's file and a file with the
values of `model.architecture`. Any difference would change the model's outputs.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posttrain.checkpoint.formats.config_sections import (
    TEXT,
    VISION,
    has_sections,
    mrope_section,
    sections,
    with_sections,
)
from posttrain.config.families import dimensions, family_of, modelling_module
from posttrain.config.schema import Architecture
from posttrain.errors import Problem, one_line

# The class's values that do not affect the outputs of a forward pass.
_WITHOUT_EFFECT = {
    *("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "initializer_range"),
    *("use_cache", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits"),
    "_name_or_path",
    *("router_aux_loss_coef", "pretraining_tp", "max_window_layers", "num_mtp_layers", "num_nextn_predict_layers"),
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "max_position_embeddings", "auto_map", "quantization_config"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
}
# Read by transformers although no configuration class declares them.
_UNDECLARED = ("is_causal", "attention_chunk_size", "sliding_window", "head_dim", "original_max_position_embeddings")
# Attributes of the class that published files have as keys.
_SAVED = {
    *("model_type", "name_or_path", "num_labels", "output_attentions", "rope_scaling", "torch_dtype"),
    *("use_return_dict", "_attn_implementation", "_experts_implementation"),
}
# Nested configurations, which transformers would use instead of the outer one.
_NESTED = (TEXT, "decoder", "generator", "text_encoder", "encoder", "per_layer_config")
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0}


def check_meaning(config: Mapping[str, Any], written: Mapping[str, Any], arch: Architecture) -> Iterator[Problem]:
    """Yield each value used by transformers that the architecture does not describe.

    Args:
        config: The checkpoint's `config.json`.
        written: A `config.json` with the architecture's values; see `hub_config`.
        arch: The architecture.
    """
    if problem := next(_nested_elsewhere(config, arch), None):
        yield problem
        return
    shadows = {f"{name}.{key}" if name else key for name, key in _shadows(config, arch)}
    for key in sorted(shadows):
        allowed, value = (
            "no key of this name: it would take the place of a part of transformers' class",
            _at(config, key),
        )
        yield Problem(
            "key-shadows-transformers", f"config.json: {key}", one_line(repr(value)), allowed, "remove the key"
        )
    try:
        found = _values(_without(config, shadows), arch)
    # The file is not ours, so report any exception of the library as a problem of the file.
    except Exception as error:
        value = one_line(f"{type(error).__name__}: {error}")
        remedy = "correct it, or fetch the file again"
        yield Problem("config-unreadable", "config.json", value, "what transformers can read", remedy)
        return
    expected = _values(written, arch)
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            said = f"{found.get(key)!r} to transformers" + ("" if _is_said(config, key) else ", being left out")
            allowed = f"{expected.get(key)!r} (model.architecture)"
            yield Problem("transformers-reads-otherwise", f"config.json: {key}", one_line(said), allowed, _REMEDY)


_REMEDY = "this variant is not supported: correct the file, or give the checkpoint that model.architecture describes"


def hub_config(arch: Architecture, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the architecture's values and the fixed ones."""
    content = {"architectures": [family_of(arch).hub_class], "dtype": "bfloat16", **fixed, **dimensions(arch)}
    scaling = content.pop("rope_scaling", {})
    rope = {**scaling, "rope_type": "yarn"} if arch.rope_scaling.factor > 1 else {"rope_type": "default"}
    content["rope_parameters"] = {"rope_theta": content.pop("rope_theta"), **rope}
    if arch.n_routed_experts:
        content["num_experts"] = arch.n_routed_experts  # the name in some families
    if arch.kv_lora_rank and not arch.q_lora_rank:
        content["q_lora_rank"] = None
    if not has_sections(arch):
        return content
    content["mtp_num_hidden_layers"] = content.pop("num_nextn_predict_layers", 0)
    content.pop("n_routed_experts", None)
    # In both places: see `keys_of_engines`.
    factor = content["partial_rotary_factor"]
    content["rope_parameters"] |= {"partial_rotary_factor": factor, "mrope_interleaved": True}
    content["rope_parameters"]["mrope_section"] = mrope_section(arch)
    return with_sections(arch, content)


def _values(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """Return the effective values that the family's classes derive from a file, those of a section as SECTION.KEY."""
    classes = _config_classes(arch)
    parsed: dict[str, Any] = classes[""].from_dict(_copied(config)).to_dict()
    values: dict[str, Any] = {}
    for name, config_class in classes.items():
        section = parsed[name] if name else parsed
        meant = _effective(section, config_class, arch) if name != VISION else _read_keys(section, config_class)
        values |= {f"{name}.{key}" if name else key: value for key, value in meant.items() if key not in classes}
    return values


def _effective(values: Mapping[str, Any], config_class: Any, arch: Architecture) -> dict[str, Any]:
    """Return a section's values with effect; positions are normalised."""
    rope = values.get("rope_parameters") or {}
    positions = {f"rope_parameters.{key}": value for key, value in _rope_meaning(rope).items()} if rope else {}
    # MLA has as many key heads as heads; transformers fails with any other number.
    idle = {"rope_parameters", *(["num_key_value_heads"] if arch.kv_lora_rank else [])}
    found = _read_keys(values, config_class)
    return {key: value for key, value in found.items() if key not in idle} | positions


def _read_keys(values: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    read = {*config_class().to_dict(), *_UNDECLARED} - _WITHOUT_EFFECT
    return {key: value for key, value in values.items() if key in read}


def _config_classes(arch: Architecture) -> dict[str, Any]:
    """Return the class of the file, as "", and that of each section."""
    module = importlib.import_module(modelling_module(arch.model_type).replace("modeling", "configuration"))
    name = re.sub("For(CausalLM|ConditionalGeneration)$", "", family_of(arch).hub_class)
    spelled = {"": "", TEXT: "Text", VISION: "Vision"} if has_sections(arch) else {"": ""}
    return {section: getattr(module, f"{name}{word}Config") for section, word in spelled.items()}


def _nested_elsewhere(config: Mapping[str, Any], arch: Architecture) -> Iterator[Problem]:
    """Yield configurations inside a section, which transformers would use instead of it."""
    for name, section in sections(config):
        for key in _NESTED:
            if section.get(key) is not None and not (has_sections(arch) and (name, key) == ("", TEXT)):
                remedy = "give the configuration of the language model alone"
                place = f"config.json: {name}.{key}" if name else f"config.json: {key}"
                yield Problem("nested-config", place, one_line(repr(section[key])), "none", remedy)


def _shadows(config: Mapping[str, Any], arch: Architecture) -> Iterator[tuple[str, str]]:
    """Yield section and key of each value that would override a part of its class."""
    for name, config_class in _config_classes(arch).items():
        parts = _parts_of(config_class)
        section = config[name] if name else config
        yield from ((name, key) for key in section if key in parts and key not in (TEXT, VISION))


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the file without keys, those of a section as SECTION.KEY."""

    def kept(section: Mapping[str, Any], place: str) -> dict[str, Any]:
        return {key: value for key, value in section.items() if f"{place}{key}" not in keys}

    parts = {name: kept(section, f"{name}.") for name, section in sections(config) if name}
    return kept(config, "") | parts


def _at(config: Mapping[str, Any], key: str) -> Any:
    section, _, rest = key.partition(".")
    return config[section][rest] if rest and section in (TEXT, VISION) else config.get(key)


def _is_said(config: Mapping[str, Any], key: str) -> bool:
    section, _, rest = key.partition(".")
    return rest in config[section] if section in (TEXT, VISION) else key in config


def _parts_of(config_class: Any) -> set[str]:
    """Return the names of a configuration class's methods and attributes, which keys of a file would override."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return {name for kind in config_class.__mro__ for name in vars(kind)} - fields - _SAVED


def _copied(value: Any) -> Any:
    """Copy nested values, because the class modifies its input."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _rope_meaning(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that determine positions, with defaults, without numbers that are not used."""
    said = {key: value for key, value in rope.items() if value is not None and key != "type"}
    kind = said.get("rope_type", "default")
    read = {"rope_type", "rope_theta", "partial_rotary_factor"}
    if kind == "yarn":
        read |= {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"}
        # `mscale` is used only with `mscale_all_dim`; without both, the logarithm of the factor is.
        read |= {"mscale_all_dim", *(["mscale"] if said.get("mscale") and said.get("mscale_all_dim") else [])}
    elif kind != "default":
        read |= said.keys()
    values = {**_ROPE_DEFAULTS, **said}
    return {key: value for key, value in values.items() if key in read and not (key == "mscale_all_dim" and not value)}

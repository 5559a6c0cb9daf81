"""Reads a checkpoint's dimensions and precision from its `config.json`, for models without a file in config/models.

For known dimensions, `hf_config.check_config` compares a checkpoint with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from posttrain.checkpoint.formats.config_sections import read_vision, text_section
from posttrain.checkpoint.formats.hf_config import OTHER_SPELLINGS
from posttrain.config.families import FAMILIES, Family, check_architecture
from posttrain.config.schema import Architecture, RopeScaling
from posttrain.errors import ConfigError, Problem, one_line, raise_if_any

# Default of a required key.
MISSING = "???"
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def architecture_of(content: Mapping[str, Any], where: str) -> Architecture:
    """Return the dimensions in `config.json`.

    Args:
        content: Content of the file.
        where: Name for error messages.

    Raises:
        ConfigError: The family is unknown, or a dimension is missing or not a number.
    """
    model_type = content.get("model_type")
    if model_type not in FAMILIES:
        remedy = "give a checkpoint of one of these families"
        if str(model_type).removesuffix("_text") in FAMILIES:
            remedy = "this is the text model alone: give the checkpoint with its vision tower, as it was published"
        found = one_line(repr(model_type))
        raise ConfigError([Problem("unknown-model-type", f"{where}: model_type", found, ", ".join(FAMILIES), remedy)])
    family, section = FAMILIES[str(model_type)], text_section(content)
    known = {*family.needs, *family.may}
    values: dict[str, Any] = {"model_type": str(model_type)}
    problems = []
    for field in dataclasses.fields(Architecture):
        name, is_needed = field.name, field.default == MISSING
        if name in (*_ROPE, "model_type", "vision", "full_attention_interval") or not (is_needed or name in known):
            continue
        spelled = (name, *OTHER_SPELLINGS.get(name, ()))
        value = next((section[word] for word in spelled if section.get(word) is not None), None)
        if _is_of(value, str(field.type)):
            values[name] = value
        elif value is not None or is_needed:
            shown = "(missing)" if value is None else one_line(repr(value))
            problems.append(
                Problem(
                    "dimension-missing", f"{where}: {name}", shown, "a number", "give the file that the model came with"
                )
            )
    raise_if_any(problems)
    values |= {"full_attention_interval": _interval(section)} if "full_attention_interval" in known else {}
    values |= {"vision": read_vision(content)} if "vision" in known else {}
    arch = Architecture(**values, **_rope(section, family))
    raise_if_any(list(check_architecture(arch)))
    return arch


def precision_of(content: Mapping[str, Any], where: str) -> str:
    """Return the precision of a checkpoint's weights: "bf16", "fp8" or "nvfp4".

    Raises:
        ConfigError: The quantisation is unknown.
    """
    declared = content.get("quantization_config")
    if not declared:
        return "bf16"
    declared = declared if isinstance(declared, Mapping) else {}
    method, algorithm = declared.get("quant_method"), declared.get("quant_algo")
    if method == "fp8" or (method == "compressed-tensors" and declared.get("format") == "float-quantized"):
        return "fp8"
    if method == "modelopt" and algorithm == "NVFP4":
        return "nvfp4"
    found = one_line(f"quant_method {method!r}, {algorithm or declared.get('format')!r}")
    allowed = "none, fp8, float-quantized of compressed-tensors, NVFP4 of Model Optimizer"
    problem = Problem(
        "unknown-quantization",
        f"{where}: quantization_config",
        found,
        allowed,
        "give a checkpoint in one of these formats",
    )
    raise ConfigError([problem])


def _interval(section: Mapping[str, Any]) -> int:
    """Return the distance of layers that attend, 0 if neither of its two keys tells."""
    interval, kinds = section.get("full_attention_interval"), section.get("layer_types")
    if type(interval) is int:
        return interval
    return kinds.index("full_attention") + 1 if isinstance(kinds, list) and "full_attention" in kinds else 0


def _rope(content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the positions' parameters: transformers 5 writes `rope_parameters`, older versions two keys."""
    parameters = content.get("rope_scaling") or content.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    found: dict[str, Any] = {"rope_theta": parameters.get("rope_theta", content.get("rope_theta", 0.0))}
    if "partial_rotary_factor" in family.needs:
        factor = parameters.get("partial_rotary_factor", content.get("partial_rotary_factor", 0.0))
        found["partial_rotary_factor"] = factor
    if parameters.get("rope_type", parameters.get("type")) == "yarn":
        names = [field.name for field in dataclasses.fields(RopeScaling)]
        found["rope_scaling"] = RopeScaling(**{name: parameters[name] for name in names if name in parameters})
    return found


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value has a field's type; JSON's true is not a number."""
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    return isinstance(value, int | float if kind == "float" else int)

"""The sections of a `config.json` whose model has a vision tower.

    architectures, model_type, token ids of images, tie_word_embeddings
    text_config     the language model, with the keys that other families have at the top
    vision_config   the vision tower

Other families have one section, the file itself.

Source: Qwen/Qwen3.5-35B-A3B at 59d61f3c, config.json; transformers 5.23, `models/qwen3_5/configuration_qwen3_5.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.config.families import FAMILIES, family_of
from posttrain.config.schema import Architecture
from posttrain.config.vision import VisionTower
from posttrain.errors import Problem, one_line

CONFIG = "config.json"
TEXT, VISION, TIED = "text_config", "vision_config", "tie_word_embeddings"
# transformers takes the vision tower's tensors as they are; these values decide what they compute.
_FIXED_VISION = {"hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}
_FIXED_OUTER = {"language_model_only": False}
_ROPE_OF_IMAGES = {"rope_type": "axial", "rope_theta": 10_000}
_WITH_SECTIONS = [name for name, family in FAMILIES.items() if "vision" in (*family.needs, *family.may)]
_VARIANT = "this variant is not supported"


def has_sections(arch: Architecture) -> bool:
    """Return whether the family's `config.json` has sections."""
    return arch.model_type in _WITH_SECTIONS


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section with the language model's values: `text_config`, or the whole file."""
    return dict(sections(config)).get(TEXT, config)


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the file as "" and, in families that have them, each section with its name."""
    yield "", config
    names = (TEXT, VISION) if config.get("model_type") in _WITH_SECTIONS else ()
    yield from ((name, config[name]) for name in names if isinstance(config.get(name), Mapping))


def in_section(config: Mapping[str, Any], problems: Iterator[Problem]) -> Iterator[Problem]:
    """Name the section in the keys of problems of the language model's values."""
    start = f"{CONFIG}: "
    for problem in problems:
        if text_section(config) is not config and problem.key.startswith(start):
            problem = dataclasses.replace(problem, key=f"{start}{TEXT}.{problem.key.removeprefix(start)}")
        yield problem


def with_sections(arch: Architecture, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with sections.

    Args:
        arch: Dimensions; their `vision` becomes the vision tower's section.
        text: The language model's section, with `architectures`, which moves to the top.
    """
    text = {key: value for key, value in text.items() if key not in ("vision", "model_type")}
    vision = {**dataclasses.asdict(arch.vision), **_FIXED_VISION, "out_hidden_size": arch.hidden_size}
    return {
        "architectures": text.pop("architectures"),
        "model_type": arch.model_type,
        "dtype": text.get("dtype"),
        TIED: arch.tie_word_embeddings,
        TEXT: {"model_type": f"{arch.model_type}_text", **text},
        VISION: {"model_type": f"{arch.model_type}_vision", **vision},
    }


def mrope_section(arch: Architecture) -> list[int]:
    """Return how many rotary pairs time, height and width have; a text's positions are equal in all three.

    Example:
        Heads of 256, a quarter of it rotated, have 32 pairs: [11, 11, 10].
    """
    pairs = int(arch.head_dim * arch.partial_rotary_factor) // 2
    return [len(range(axis, pairs, 3)) for axis in range(3)]


def keys_of_engines(arch: Architecture) -> dict[str, Any]:
    """Return the keys of `text_config` that SGLang reads and transformers may spell in another way; else empty.

    Without `partial_rotary_factor`, SGLang 0.5.23 rotates a quarter of each head (`srt/configs/qwen3_next.py`), while
    transformers reads and writes it in `rope_parameters`. Without `full_attention_interval` SGLang ends
    (`srt/models/qwen3_5.py`), while transformers may write `layer_types` alone.
    """
    names = ("full_attention_interval", "partial_rotary_factor")
    return {name: getattr(arch, name) for name in names} if has_sections(arch) else {}


def check_sections(config: Mapping[str, Any], arch: Architecture) -> Iterator[Problem]:
    """Compare the top of a file with sections, and its vision tower, with the architecture."""
    if not has_sections(arch):
        return
    for name in (TEXT, VISION):
        if not isinstance(config.get(name), Mapping):
            said = one_line(repr(config.get(name))) if name in config else "(missing)"
            remedy = (
                f"give the checkpoint of {family_of(arch).hub_class} as it was published; one of the text model alone "
                "is not supported, because transformers would add a random vision tower"
            )
            yield Problem("section-missing", f"{CONFIG}: {name}", said, f"the section of {arch.model_type}", remedy)
            return
    text, vision = config[TEXT], config[VISION]
    types = {
        TEXT: [f"{arch.model_type}_text"],
        VISION: [f"{arch.model_type}_vision", arch.model_type],  # as written by transformers, and as published
    }
    for name, allowed in types.items():
        if (found := config[name].get("model_type")) not in allowed:
            yield _differs(f"{name}.model_type", found, allowed[0])
    if bool(config.get(TIED)) != arch.tie_word_embeddings:
        yield _differs(TIED, config.get(TIED), arch.tie_word_embeddings)
    yield from _check_fixed("", config, _FIXED_OUTER)
    yield from _check_vision(vision, arch)
    yield from _check_positions_of_images(text, arch)


def _check_vision(vision: Mapping[str, Any], arch: Architecture) -> Iterator[Problem]:
    for name, expected in {**dataclasses.asdict(arch.vision), "out_hidden_size": arch.hidden_size}.items():
        # A square side or a number of frames may be written as a list.
        if (found := vision.get(name)) != expected or isinstance(found, bool):
            yield _differs(f"{VISION}.{name}", found, expected)
    yield from _check_fixed(f"{VISION}.", vision, _FIXED_VISION)
    rope = vision.get("rope_parameters")
    if rope is not None and rope != _ROPE_OF_IMAGES:
        key = f"{CONFIG}: {VISION}.rope_parameters"
        yield Problem("model-variant", key, one_line(repr(rope)), repr(_ROPE_OF_IMAGES), _VARIANT)


def _check_positions_of_images(text: Mapping[str, Any], arch: Architecture) -> Iterator[Problem]:
    """Check the values that only images depend on: the text's three positions are equal."""
    rope = text.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    expected = {"mrope_section": mrope_section(arch), "mrope_interleaved": True}
    yield from _check_fixed(f"{TEXT}.rope_parameters.", rope, expected)


def _check_fixed(place: str, section: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[Problem]:
    for key, expected in fixed.items():
        if (found := section.get(key, expected)) != expected:
            yield Problem("model-variant", f"{CONFIG}: {place}{key}", one_line(repr(found)), repr(expected), _VARIANT)


def _differs(key: str, found: Any, expected: Any) -> Problem:
    value = "(missing)" if found is None else one_line(repr(found))
    remedy = "correct model.architecture in the model's file, or give the checkpoint it describes"
    return Problem("architecture-differs", f"{CONFIG}: {key}", value, f"{expected!r} (model.architecture)", remedy)


def read_vision(config: Mapping[str, Any]) -> VisionTower:
    """Return the dimensions of the vision tower; what is no number is left at its default, which no tower has."""
    section = config.get(VISION)
    section = section if isinstance(section, Mapping) else {}
    names = [field.name for field in dataclasses.fields(VisionTower)]
    return VisionTower(**{name: section[name] for name in names if type(section.get(name)) is int})

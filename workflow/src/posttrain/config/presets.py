"""Named algorithms: the lines of `algorithms.yaml`, and the name of a section `algorithm`.

The parts are independent, so any combination works, including those without a preset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posttrain.config import schema
from posttrain.config.derived import is_off_policy
from posttrain.config.fields import fields_of
from posttrain.errors import Problem

PRESETS = "algorithms.yaml"
# Levels of a ratio in words.
UNITS = {
    "token": "per token",
    "sequence": "per sequence",
    "geometric": "per sequence, geometric mean of its tokens",
}


def algorithm_name(config: schema.Config, presets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the preset with these parts, the chosen one first; otherwise the differences from the chosen one."""
    algorithm = config.algorithm
    if config.training.objective == "sft":
        return "supervised fine-tuning"
    chosen = presets[algorithm.preset]
    for name, line in {algorithm.preset: chosen, **presets}.items():
        if all(getattr(algorithm, key) == value for key, value in line.items()):
            return name
    changed = [f"{key}={mine}" for key, value in chosen.items() if (mine := getattr(algorithm, key)) != value]
    return f"{algorithm.preset} with {', '.join(changed)}: no published combination"


def ratios_in_words(config: schema.Config) -> dict[str, str]:
    """Return the objective's two ratios of policies; empty if a step trains only on tokens of the trainer's weights.

    Example:
        `tis` -> {"clipped ratio": "trainer now / trainer before the step, per token", "outer ratio": "trainer before
        the step / sampler, per token, truncated at 2"}.
    """
    if not is_off_policy(config):
        return {}
    settings = config.algorithm
    unit = UNITS[settings.ratio_level]
    if settings.old_logprobs == "engine":
        return {"clipped ratio": f"trainer now / sampler, {unit}", "outer ratio": "none"}
    return {"clipped ratio": f"trainer now / trainer before the step, {unit}", "outer ratio": _outer_ratio(settings)}


def _outer_ratio(settings: schema.Algorithm) -> str:
    if settings.correction == "none":
        return "none"
    low, high = f"{settings.correction_low:g}", f"{settings.correction_high:g}"
    masked = f"0 outside of {low} to {high}" if settings.correction_low else f"0 above {high}"
    bound = f"truncated at {high}" if settings.correction == "truncate" else masked
    return f"trainer before the step / sampler, {UNITS[settings.correction_level]}, {bound}"


def unused_numbers(values: Mapping[str, Any], chosen: Collection[str]) -> Iterator[Problem]:
    """Yield values that were set but are not used by any chosen part.

    Args:
        values: Dotted key -> value.
        chosen: Keys set by the user, directly or in a file.
    """
    for key, _, limits in fields_of(schema.Config):
        for part, users in limits.get("used_by", {}).items():
            if key in chosen and values.get(part) not in users:
                allowed = f"no value with {part}={values.get(part)}, which does not use it"
                remedy = f"leave it out, or set {part} to {' or '.join(users)}"
                yield Problem("unused-value", key, repr(values.get(key)), allowed, remedy)


def check_bounds(config: schema.Config) -> Iterator[Problem]:
    """Yield empty ranges, and values that another setting makes useless."""
    settings = config.algorithm
    if settings.old_logprobs == "engine" and settings.correction != "none":
        allowed = "none with algorithm.old_logprobs=engine: the ratio itself compares with the engine"
        remedy = "set algorithm.correction=none, or algorithm.old_logprobs=trainer"
        yield Problem("correction-unused", "algorithm.correction", settings.correction, allowed, remedy)
    low, high, upper = settings.correction_low, settings.correction_high, 1 + settings.clip_ratio_high
    if settings.correction == "mask" and low >= high:
        remedy = "lower it, or raise algorithm.correction_high: otherwise no token is left to learn from"
        yield Problem(
            "bounds-crossed", "algorithm.correction_low", str(low), f"below algorithm.correction_high={high}", remedy
        )
    if settings.clip == "dual" and settings.clip_ratio_dual <= upper:
        remedy = "raise it, or lower algorithm.clip_ratio_high"
        allowed = f"above 1 + algorithm.clip_ratio_high, which is {upper:g}"
        yield Problem("bounds-crossed", "algorithm.clip_ratio_dual", str(settings.clip_ratio_dual), allowed, remedy)

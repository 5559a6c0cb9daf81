"""Checks before any job whether a model can become NVFP4; runs if a rule needs the checkpoint for serving."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.config.calibration import MADE
from posttrain.config.data import UNPINNED
from posttrain.config.derived import calibration_passes, is_calibrated_here, token_budget
from posttrain.config.schema import Config
from posttrain.errors import Problem, raise_if_any
from posttrain.plan.sizing.calibration import calibration_gib
from posttrain.plan.sizing.memory_phases import capacity_gib
from posttrain.store import Paths, read_json

# Publishers' names of releases in eight or four bits.
_QUANTISED_NAME = re.compile(r"[-_.](fp8|nvfp4|int4|int8|awq|gptq)\b", re.IGNORECASE)


def refuse_unservable(paths: Paths) -> None:
    """Raise a `ConfigError` if the checkpoint for serving should not be made."""
    config = paths.resolved.config
    if config.serving.format == "nvfp4":
        raise_if_any([*check_nvfp4(config), *_check_source(paths)])


def check_nvfp4(config: Config) -> Iterator[Problem]:
    """Yield settings that prevent a correct conversion of experts to NVFP4."""
    serving, arch = config.serving, config.model.architecture
    if not arch.n_routed_experts:
        allowed = "a model with routed experts: of a dense one nothing is on the list of what becomes NVFP4"
        remedy = "set serving.format=mxfp8"
        yield Problem("nvfp4-without-experts", "serving.format", f"nvfp4 of {config.model.name}", allowed, remedy)
        return
    passes = calibration_passes(config)
    if serving.uncalibrated and serving.calibration:
        allowed = "false beside serving.calibration, whose files say what the scales are"
        yield Problem("calibrated-and-not", "serving.uncalibrated", "true", allowed, "leave one of them out")
    if not is_calibrated_here(config):
        return
    if not passes:
        allowed = "calibration passes, or files in serving.calibration: an input_scale of 1 is not measured"
        remedy = "name passes, give files, or set serving.uncalibrated=true to accept scales of 1"
        yield Problem("not-calibrated", "serving.passes", "none", allowed, remedy)
    if serving.weights == "trained" and config.export.checkpoint_folder:
        allowed = "model: another trainer's checkpoint is not one that ours loads"
        remedy = "export it, and make that the source of another configuration (model.source.kind=folder)"
        yield Problem(
            "calibration-of-other-trainer", "serving.weights", "trained with export.checkpoint_folder", allowed, remedy
        )
    yield from _check_passes(config)


def _check_passes(config: Config) -> Iterator[Problem]:
    positions, budget = config.model.architecture.max_position_embeddings, token_budget(config)
    for name, wanted in calibration_passes(config).items():
        key, longest = f"serving.passes.{name}", min(wanted.max_tokens, positions)
        sources = {MADE: wanted.made, "files": wanted.file, "hub": wanted.repo_id}
        if not sources[wanted.kind]:
            own = {MADE: "made", "files": "file", "hub": "repo_id"}[wanted.kind]
            yield Problem("not-set", f"{key}.{own}", "''", f"what it reads, with kind={wanted.kind}", "name it")
        if wanted.kind == "hub" and wanted.revision in ("", UNPINNED):
            remedy = f"give the commit that the page of {wanted.repo_id} shows"
            yield Problem("revision-not-pinned", f"{key}.revision", repr(wanted.revision), "40 hex digits", remedy)
        if wanted.min_tokens > longest:
            allowed = f"at most {longest}: conversations are cut there (max_tokens, the model's {positions} positions)"
            remedy = "lower it, or raise max_tokens"
            yield Problem("conversations-cut-too-short", f"{key}.min_tokens", str(wanted.min_tokens), allowed, remedy)
        if longest > budget and config.hardware.device == "cuda":
            allowed = f"at most {budget}, the tokens of a micro-batch that memory is planned for"
            remedy = f"raise trainer.max_tokens_per_gpu, or set {key}.max_tokens={budget}"
            yield Problem("token-budget-too-small", f"{key}.max_tokens", str(wanted.max_tokens), allowed, remedy)
    needed, limit = calibration_gib(config), capacity_gib(config)
    if calibration_passes(config) and needed > limit:
        allowed = f"at most {limit:g} GiB per rank ({config.hardware.name})"
        remedy = "more nodes"
        yield Problem(
            "calibration-exceeds-memory", "parallel", f"{needed:.1f} GiB per rank while it calibrates", allowed, remedy
        )


def _check_source(paths: Paths) -> Iterator[Problem]:
    """Yield a problem if the weights are already quantised, by their config if it exists, otherwise by their name."""
    config = paths.resolved.config
    source = config.model.source
    remedy = "give the BF16 release that it was made from: model.source.repo_id, or model.source.kind=folder"
    allowed = "weights in BF16: quantising twice adds the errors up"
    for folder in (paths.hf, paths.source_folder if source.kind == "folder" else paths.hf):
        try:
            declared = read_json(folder / "config.json").get("quantization_config")
        except (OSError, ValueError, AttributeError):
            continue  # does not exist yet, or its reader reports the error
        if declared:
            method = declared.get("quant_method") if isinstance(declared, dict) else declared
            yield Problem("already-quantized", "model.source", f"{folder}: quantised ({method})", allowed, remedy)
            return
    if source.kind == "hub" and (found := _QUANTISED_NAME.search(source.repo_id)):
        yield Problem(
            "already-quantized",
            "model.source.repo_id",
            source.repo_id,
            f"{allowed}; it is a release in {found[1]}",
            remedy,
        )

"""The served checkpoint: a run's export, a model of `config/models`, a folder, or a repository of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.checkpoint.formats.hf_architecture import architecture_of, precision_of
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.config.data import UNPINNED
from posttrain.config.fields import did_you_mean
from posttrain.config.load import Resolved, load_resolved, merge
from posttrain.config.model_names import known_models, plain_name
from posttrain.config.schema import Architecture, Config
from posttrain.errors import ConfigError, Problem, one_line
from posttrain.store import Paths, receipt_of
from posttrain_serving.activation_scales import check_scales

CONFIG_FILE, RESOLVED_FILE = "config.json", "config.resolved.yaml"
# Repositories with the same weights in other precisions; from `sglang-glm5-cookbook.txt` and
# `glm5-nvfp4-model-card.txt`.
FORMS = {"zai-org/GLM-5": {"fp8": "zai-org/GLM-5-FP8", "nvfp4": "lukealonso/GLM-5-NVFP4"}}
_PRECISION = re.compile(r"(?P<precision>fp8|bf16|nvfp4)(v\d+)?")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """Weights to serve.

    Args:
        place: A folder, or the name of a Hub repository.
        name: Served model name.
        architecture: The model's dimensions.
        precision: "bf16", "fp8" or "nvfp4".
        is_folder: Whether `place` is a folder.
        missing: The command that makes the folder, if it does not exist yet.
        hardware: Hardware of the model's file; empty: unknown.
        method: Quantisation method of its `config.json`; empty: unknown, or none.
        revision: Commit of the repository that the model's file pins; empty: none.
    """

    place: str
    name: str
    architecture: Architecture
    precision: str
    is_folder: bool
    missing: str = ""
    hardware: str = ""
    method: str = ""
    revision: str = ""


def find_checkpoint(what: str, precision: str, folders: Iterable[Path], results: Path) -> Checkpoint:
    """Return the checkpoint that a command-line argument names.

    Args:
        what: A folder, a run, a model of `config/models`, or a repository of the Hub.
        precision: Requested precision; empty: the checkpoint's own.
        folders: Folders with the layout of `config/`.
        results: Folder of runs.

    Raises:
        ConfigError: The checkpoint is unknown, or does not exist in this precision.
        CheckpointError: `config.json` of a folder is missing or invalid.
    """
    folders = list(folders)
    if Path(what).expanduser().is_dir():
        return _checked(_of_folder(Path(what).expanduser()), precision)
    if (results / what / RESOLVED_FILE).is_file():
        config = load_resolved(results / what / RESOLVED_FILE)
        return of_run(Resolved(config, {}, what), precision)
    known = dict(known_models(folders))
    if what in known.values():
        return _of_model(_config_of(what, folders), precision)
    if _REPOSITORY.fullmatch(what):
        return _of_repository(what, precision, known, folders)
    near = did_you_mean(what, sorted(set(known.values())))
    allowed = f"a folder, a run of {results}, a repository such as zai-org/GLM-5-FP8, or a model of config/models"
    raise ConfigError(
        [Problem("no-such-checkpoint", "checkpoint", one_line(repr(what)), allowed, near or "correct the name")]
    )


def of_run(resolved: Resolved, precision: str) -> Checkpoint:
    """Return the checkpoint that a run exports.

    Raises:
        ConfigError: The run does not export this precision.
    """
    paths, model = Paths(resolved), resolved.config.model
    serving = resolved.config.serving
    if precision == "nvfp4" and (serving.format, serving.weights) != ("nvfp4", "trained"):
        value = f"nvfp4 with serving.format={serving.format}, serving.weights={serving.weights}"
        remedy = "add set='serving.weights=trained' to the words of the run (docs/checkpoints.md)"
        raise ConfigError(
            [
                Problem(
                    "precision-not-made", "--precision", value, "serving.format=nvfp4, serving.weights=trained", remedy
                )
            ]
        )
    folder = {"fp8": paths.export_fp8, "nvfp4": paths.serving}.get(precision, paths.hf_export)
    missing = "" if (folder / CONFIG_FILE).is_file() else f"`snakemake {receipt_of(folder)}` of this configuration"
    place, hardware = str(folder.absolute()), resolved.config.hardware.name
    is_block = resolved.config.quantize.strategy == "block"
    method = {"fp8": "fp8" if is_block else "compressed-tensors", "nvfp4": "modelopt"}.get(precision, "")
    if precision == "nvfp4" and not missing:
        check_scales(folder)
    return Checkpoint(place, model.name, model.architecture, precision or "bf16", True, missing, hardware, method)


def _of_folder(folder: Path) -> Checkpoint:
    content, where = read_object(folder / CONFIG_FILE), str(folder / CONFIG_FILE)
    name = folder.resolve().name.lower()
    architecture, precision = architecture_of(content, where), precision_of(content, where)
    method = str((content.get("quantization_config") or {}).get("quant_method", ""))
    if precision == "nvfp4":
        check_scales(folder)
    return Checkpoint(str(folder.absolute()), name, architecture, precision, is_folder=True, method=method)


def _of_model(config: Config, precision: str) -> Checkpoint:
    model = config.model
    if model.source.kind != "hub":
        remedy = f"give a folder, or the run: posttrain serve model={model.name}"
        raise ConfigError(
            [Problem("model-made-here", "checkpoint", model.name, "a model that comes from the Hub", remedy)]
        )
    source, hardware = model.source.repo_id, config.hardware.name
    found = Checkpoint(source, served_name(source), model.architecture, "bf16", False, hardware=hardware)
    return _in_form(replace(found, revision=_pinned(source, config)), precision)


def _of_repository(what: str, precision: str, known: dict[str, str], folders: list[Path]) -> Checkpoint:
    """Match a repository to a model of ours by its name, which may end with the precision."""
    plain = plain_name(what.rpartition("/")[2])
    for name, model in known.items():
        rest = plain.removeprefix(name)
        form = _PRECISION.fullmatch(rest)
        if plain.startswith(name) and (form or not rest):
            config = _config_of(model, folders)
            own = form["precision"] if form else "bf16"
            arch, hardware = config.model.architecture, config.hardware.name
            found = Checkpoint(what, served_name(what), arch, own, False, hardware=hardware)
            return _in_form(replace(found, revision=_pinned(what, config)), precision)
    allowed = f"a repository named after a model of config/models: {', '.join(sorted(set(known.values())))}"
    remedy = "download it and give its folder: what it is stands in its config.json"
    raise ConfigError([Problem("unknown-name", "checkpoint", one_line(what), allowed, remedy)])


def _pinned(repository: str, config: Config) -> str:
    """Return the commit that a model's file pins for a repository; "" if it pins none."""
    source = config.model.source
    return source.revision if source.repo_id == repository and source.revision != UNPINNED else ""


def served_name(repository: str) -> str:
    """Return a repository's served model name: zai-org/GLM-5-FP8 is glm-5."""
    name = repository.rpartition("/")[2].lower()
    return re.sub(r"[-_.](fp8|bf16|nvfp4)([-_.]v\d+)?$", "", name)


def _in_form(found: Checkpoint, precision: str) -> Checkpoint:
    """Return the repository with the same weights in the requested precision, if one is known."""
    if precision in FORMS.get(found.place, {}):
        return replace(found, place=FORMS[found.place][precision], precision=precision, revision="")
    return _checked(found, precision)


def _checked(found: Checkpoint, precision: str) -> Checkpoint:
    """Return the checkpoint if it has the requested precision."""
    if not precision or precision == found.precision:
        return found
    made = {"fp8": "finalize_rollout_fp8", "nvfp4": "finalize_serving", "bf16": "finalize_bf16"}[precision]
    remedy = f"leave --precision out, or make it: `snakemake {made}` (docs/checkpoints.md), and give that folder"
    raise ConfigError(
        [
            Problem(
                "precision-not-made", "--precision", precision, f"{found.precision}, which {found.place} is in", remedy
            )
        ]
    )


def _config_of(model: str, folders: list[Path]) -> Config:
    own = {"configs": str(folders[1])} if len(folders) > 1 else {}
    return merge({"model": model, "site": "local", **own}, folders[0]).config

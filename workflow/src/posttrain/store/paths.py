"""All paths of a run; no other module builds them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.data import task_of
from posttrain.config.derived import (
    calibration_passes,
    calibration_settings,
    engines_load,
    fp8_settings,
    is_calibrated_here,
    serving_settings,
    start_settings,
)
from posttrain.config.families import dimensions
from posttrain.config.load import Resolved, digest8
from posttrain.store.data_folders import pass_folders, suite_folders, versioned
from posttrain.store.format_versions import FORMAT_VERSIONS, patch_version
from posttrain.store.plain_json import read_json
from posttrain.store.weight_formats import EXPORT_FOLDER, START_FOLDER

# File of a training checkpoint with its files and their hashes.
MANIFEST_NAME = "manifest.json"
# File of a calibration with the number of tokens per expert.
COVERAGE_NAME = "coverage.json"


@dataclass(frozen=True)
class Paths:
    """All paths of one resolved run.

    Args:
        resolved: The configuration of the run.
    """

    resolved: Resolved

    # ---- the store: artefacts made once per model, revision and setting, shared by runs ----

    @property
    def store(self) -> Path:
        """Root of the artefacts that do not depend on a run."""
        return Path(self.resolved.config.site.store)

    @property
    def revision12(self) -> str:
        """First 12 characters of the source's identity: the pinned commit, or a digest for other kinds of source."""
        model = self.resolved.config.model
        if model.source.kind == "hub":
            return model.source.revision[:12]
        if model.source.kind == "run":
            return f"run{model.source.revision[:9]}"
        if model.source.kind == "folder":
            return f"folder{digest8(os.path.abspath(model.source.folder))[:6]}"
        return f"made{digest8(self._made_from())}"

    @property
    def model_root(self) -> Path:
        """All checkpoint states of one model revision."""
        revision = versioned(self.revision12, "download_hf_checkpoint", "finalize_hf_checkpoint")
        return self.store / self.resolved.config.model.name / revision

    @property
    def made_model(self) -> Path:
        """The model that make_tiny_model makes, in the layout of a Hub repository."""
        return self.store / "made" / f"{self.resolved.config.model.name}-{digest8(self._made_from())}"

    @property
    def source_export(self) -> Path:
        """The export of the run that `model.source` names, in Hub layout."""
        config = self.resolved.config
        return Path(config.site.results) / config.model.source.run / "hf"

    @property
    def source_folder(self) -> Path:
        """The source of the model's files, if it is on this machine."""
        source = self.resolved.config.model.source
        of_kind = {"made": self.made_model, "run": self.source_export}
        return of_kind.get(source.kind, Path(source.folder))

    @property
    def hf(self) -> Path:
        """The model's files, unchanged."""
        return self.model_root / "hf"

    @property
    def hf_patched(self) -> Path:
        """The model's files with the config patch applied; weights are links."""
        return self.model_root / f"hf_patched-{digest8(self._patch_settings())}"

    @property
    def torch_dist(self) -> Path:
        """Megatron's distributed checkpoint."""
        return self.model_root / f"torch_dist-{digest8(self._convert_settings())}"

    @property
    def rollout_fp8(self) -> Path:
        """FP8 weights for the engines."""
        settings = fp8_settings(self.resolved.config)
        return self.model_root / f"rollout_fp8-{digest8(self._quantize_settings('rollout_fp8', settings))}"

    @property
    def rollout_start(self) -> Path:
        """Files that FP8 engines load if they start without weights: config, tokenizer and untrained parts."""
        return self._rollout_start(start_settings(self.resolved.config))

    @property
    def rollout_report(self) -> Path:
        """The quantisation errors of the FP8 weights."""
        return self.rollout_fp8.with_name(f"{self.rollout_fp8.name}.report.json")

    @property
    def export_fp8(self) -> Path:
        """The trained weights in FP8, for an evaluation; they belong to the run, although the folder is the model's."""
        settings = self._quantize_settings(EXPORT_FOLDER, fp8_settings(self.resolved.config))
        # Runs with the same name but separate results folders may share a store.
        return self.model_root / f"{EXPORT_FOLDER}-{digest8([os.path.abspath(self.hf_export), settings])}"

    @property
    def serving(self) -> Path:
        """Weights in another format, for serving; those of trained weights belong to the run, like `export_fp8`."""
        settings = serving_settings(self.resolved.config)
        if self.resolved.config.serving.weights == "model":
            return self.model_root / f"{settings['format']}-{digest8(self._quantize_settings('serving', settings))}"
        made_of = [os.path.abspath(self.hf_export), self._quantize_settings("export_serving", settings)]
        return self.model_root / f"export_{settings['format']}-{digest8(made_of)}"

    @property
    def calibration(self) -> Path:
        """The largest activations of calibration passes over these weights, one file per pass."""
        config = self.resolved.config
        settings = [FORMAT_VERSIONS["calibrate"], self._convert_settings(), calibration_settings(config)]
        if config.serving.weights == "trained":
            settings.append(os.path.abspath(self.hf_export))
        return self.model_root / f"calibration-{digest8(settings)}"

    @property
    def coverage(self) -> Path:
        """The number of tokens that a calibration routed to each expert."""
        return self.calibration / COVERAGE_NAME

    @property
    def calibration_files(self) -> list[Path]:
        """Source of the activation scales of the serving checkpoint: the user's files, or one file per pass."""
        config = self.resolved.config
        if not is_calibrated_here(config):
            return [Path(file) for file in config.serving.calibration]
        return [self.calibration / f"{name}.safetensors" for name in calibration_passes(config)]

    @property
    def bf16(self) -> Path:
        """A quantised source cast back to BF16."""
        return self.model_root / f"bf16-{digest8([FORMAT_VERSIONS['cast_to_bf16'], FORMAT_VERSIONS['finalize_bf16']])}"

    @property
    def rollout_weights(self) -> Path:
        """The weights that engines load at start: FP8, `hf_patched`, or `rollout_start` if they start without.

        A run keeps the FP8 weights that it started with. A trained run keeps its weights of either kind, because a
        change would repeat the training.
        """
        config = self.resolved.config
        if not config.rollout.fp8:
            return self.hf_patched
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # `verify` reports it
            (begun,) = (self.model_root / name for name in read_json(self.begun_from) if name.startswith("rollout_"))
            starts = [self._rollout_start(start_settings(config) | {"drafts": drafts}) for drafts in (False, True)]
            is_trained = self.train_done.exists() and receipt_of(begun).exists()
            if begun == self.rollout_fp8 or (is_trained and begun in starts):
                return begun
        return self.rollout_fp8 if engines_load(config) else self.rollout_start

    @property
    def dataset(self) -> Path:
        """Prompts, one JSON line each, in `train.jsonl` and `heldout.jsonl`."""
        data = self.resolved.experiment["data"]
        return self.store / "datasets" / versioned(f"{data['kind']}-{digest8(data)}", "download_dataset")

    @property
    def store_artefacts(self) -> dict[str, Path]:
        """All folders of the store that the run may use, by short name, in the order of the data flow."""
        return {
            "made model": self.made_model,
            "dataset": self.dataset,
            **{f"suite {name}": folder for name, folder in suite_folders(self.resolved.config).items()},
            **{f"pass {name}": folder for name, folder in pass_folders(self.resolved.config).items()},
            "hf": self.hf,
            "hf_patched": self.hf_patched,
            "torch_dist": self.torch_dist,
            "rollout_fp8": self.rollout_fp8,
            "rollout_start": self.rollout_start,
            "calibration": self.calibration,
            "serving": self.serving,
            "bf16": self.bf16,
        }

    # ---- the run ----

    @property
    def run(self) -> Path:
        """Root of the run's results."""
        return Path(self.resolved.config.site.results) / self.resolved.run

    @property
    def experiment(self) -> Path:
        """The experiment's configuration, which is training's only configuration input."""
        return self.run / "experiment.yaml"

    @property
    def config(self) -> Path:
        """The whole configuration, with the origin of each value."""
        return self.run / "config.resolved.yaml"

    @property
    def data_check(self) -> Path:
        """The result of checking prompts, labels, tokenizer and graders against each other; has a receipt."""
        return self.run / "data_check.json"

    @property
    def environment_check(self) -> Path:
        """What scripted agents earned in the environment; has a receipt."""
        return self.run / "environment_check.json"

    @property
    def fork_receipt(self) -> Path:
        """Receipt that names the run from which this run was forked."""
        return self.run / "fork.receipt.json"

    @property
    def train(self) -> Path:
        """The training run's folder: checkpoints, rollouts, metrics, attempts."""
        return self.run / "train"

    @property
    def train_done(self) -> Path:
        """Receipt of the finished training."""
        return self.train / "done.json"

    @property
    def metrics(self) -> Path:
        """The metrics, one row per training step."""
        return self.train / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of training."""
        return self.train / "checkpoints"

    @property
    def begun_from(self) -> Path:
        """The inputs (names and digests of receipts) that the first checkpoint started from."""
        return self.checkpoints / "begun_from.json"

    @property
    def attempts(self) -> Path:
        """The ended attempts of training, one row each."""
        return self.train / "attempts.jsonl"

    @property
    def lease(self) -> Path:
        """The lease of the process that trains."""
        return self.train / "lease"

    @property
    def preflight(self) -> Path:
        """The last result of `snakemake preflight`; the folder of this name has all results with their logs."""
        return self.run / "preflight.json"

    @property
    def verified(self) -> Path:
        """The result of the last `snakemake verify`, if it succeeded."""
        return self.run / "verified.json"

    @property
    def plan(self) -> Path:
        """The plan of this model on these nodes, `.json` and `.html`; plans for other nodes have other names.

        It is in the local `results` if the site's folder does not exist here, because a plan must not create it.
        """
        config, results = self.resolved.config, self.run.parent
        folder = results if results.is_dir() or not results.is_absolute() else Path("results")
        return folder / "plans" / f"{config.model.name}-{config.nodes}x{config.hardware.name}.json"

    @property
    def summary(self) -> Path:
        """A dozen numbers of the run, written when everything is done."""
        return self.run / "summary.json"

    @property
    def snapshot(self) -> Path:
        """The report of an unfinished run, rewritten on each request; the final report is made by Snakemake."""
        return self.run / "snapshot.html"

    @property
    def hf_export(self) -> Path:
        """The trained model in Hub layout; each trainer has its own folder."""
        other = self.resolved.config.export.checkpoint_folder
        return self.run.parent / f"exported-{digest8(os.path.abspath(other))}" / "hf" if other else self.run / "hf"

    @property
    def export_check(self) -> Path:
        """The result of loading the export with transformers."""
        return self.hf_export.with_name("export_check.json")

    def evaluation(self, when: str) -> Path:
        """Return the result of an evaluation; `when` is "before" or "after"."""
        return self.run / "evaluation" / f"{when}.json"

    def lm_eval(self, when: str) -> Path:
        """Return the result of lm-eval; `when` is "before" or "after"."""
        return self.run / "evaluation" / f"lm_eval_{when}.json"

    @property
    def report(self) -> Path:
        """The report."""
        return self.run / "report.html"

    def node_record(self, node: str) -> Path:
        """Return the record of a node's local copy."""
        return self.run / "node_local" / f"{node}.json"

    def node_local(self, node: str) -> Path:
        """Return the node-local folder that mirrors this model's root."""
        site = self.resolved.config.site
        return Path(site.node_local) / node / self.resolved.config.model.name / self.revision12

    # ---- logs: one folder per rule ----

    def store_log(self, rule: str, suffix: str = "") -> Path:
        """Return the log of a step in the store."""
        return Path("logs") / rule / f"{self.resolved.config.model.name}-{self.revision12}{suffix}.log"

    def run_log(self, rule: str, suffix: str = "") -> Path:
        """Return the log of a step of the run."""
        return Path("logs") / rule / f"{self.resolved.run}{suffix}.log"

    # ---- the settings in an artefact's name ----

    def _rollout_start(self, settings: Mapping[str, Any]) -> Path:
        return self.model_root / f"{START_FOLDER}-{digest8(self._quantize_settings(START_FOLDER, settings))}"

    def _made_from(self) -> dict[str, Any]:
        config = self.resolved.config
        return {
            "format": FORMAT_VERSIONS["make_tiny_model"],
            "architecture": dimensions(config.model.architecture),
            **task_of(config.data),
        }

    def _patch_settings(self) -> dict[str, Any]:
        model = self.resolved.config.model
        patch = dataclasses.asdict(model.patch)
        if patch["copies"] == "reject":  # the name from before there was a choice
            del patch["copies"]
        own = {"own": model.own_digests} if model.own_digests else {}
        return {"format": patch_version(model.architecture), "patch": patch, **own}

    def _convert_settings(self) -> dict[str, Any]:
        versions = [FORMAT_VERSIONS[step] for step in ("convert_hf_to_torch_dist", "finalize_torch_dist")]
        adopted = self.resolved.config.download.torch_dist_folder
        source = {"adopted": os.path.abspath(adopted)} if adopted else {}
        return {"format": versions, "patched": self._patch_settings(), **source}

    def _quantize_settings(self, what: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        versions = [FORMAT_VERSIONS[f"{verb}_{what}"] for verb in ("quantize", "finalize")]
        return {"format": versions, "patched": self._patch_settings(), "settings": settings}


def receipt_of(folder: Path) -> Path:
    """Return the receipt of a folder: `hf` -> `hf.receipt.json`."""
    return folder.with_name(folder.name + ".receipt.json")


def records_of(run: Path) -> Path:
    """Return the receipt of what a run's training wrote apart from checkpoints."""
    return run / "records.receipt.json"


def manifest_of(folder: Path) -> Path:
    """Return the file list of a downloaded folder: `hf` -> `hf.manifest.json`."""
    return folder.with_name(folder.name + ".manifest.json")


def part_receipt_of(folder: Path, part: int | str) -> Path:
    """Return the receipt of one independent part of a folder's content."""
    return folder.with_name(f"{folder.name}.parts") / f"{part}.receipt.json"


def partial_of(folder: Path) -> Path:
    """Return the name under which a folder is built."""
    return folder.with_name(folder.name + ".partial")

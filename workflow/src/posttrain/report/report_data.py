"""Reads and checks everything that a run wrote to disk, once, for the report."""

from __future__ import annotations

import csv
import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.config import schema
from posttrain.config.load import Resolved, load_resolved
from posttrain.errors import CheckpointError
from posttrain.report.provenance import Artifact, find_artefacts
from posttrain.report.sinks import read_rows
from posttrain.store import Paths, parse_json, read_json, read_receipt, receipt_of
from posttrain.store.weight_formats import rule_of

SHOWN_PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "snakemake",
    "wandb",
)
# Snakemake samples a job's memory every half second, so a shorter job has no useful sample.
SAMPLED_SECONDS = 5.0


@dataclass(frozen=True)
class ReportInputs:
    """Paths of the report's inputs.

    Args:
        config: `config.resolved.yaml`.
        run_folder: Root of the run; its name is the run's name.
        before: Result of the evaluation before training.
        after: Result of the evaluation after training.
        export_receipt: Receipt of the HF export.
        logs: Folder with one folder per rule: logs and benchmark files.
    """

    config: Path
    run_folder: Path
    before: Path
    after: Path
    export_receipt: Path
    logs: Path


@dataclass(frozen=True)
class RuleTime:
    """One job of a rule, from Snakemake's benchmark file or the history in a receipt.

    Args:
        rule: The rule.
        job: Name of the job: run or model, part, node.
        seconds: Wall time of the attempt that finished it.
        finished_unix: Time of its end.
        max_rss_mb: Largest sampled resident memory; None if unknown or sampled too rarely.
    """

    rule: str
    job: str
    seconds: float
    finished_unix: float
    max_rss_mb: float | None


@dataclass(frozen=True)
class RunData:
    """All data of one run; data that only a finished run has is None before, and is named in `missing`."""

    config: schema.Config
    origins: Mapping[str, str]
    run_name: str
    run_folder: Path
    rows: Sequence[Mapping[str, float]]
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    attempts: Sequence[Mapping[str, Any]]
    times: Sequence[RuleTime]
    artefacts: Sequence[Artifact]
    lineage: Sequence[Mapping[str, Any]]
    final_weights_sha256: str | None
    commit: str
    versions: Mapping[str, str]
    missing: Sequence[str] = ()
    data_check: Mapping[str, Any] | None = None
    environment_check: Mapping[str, Any] | None = None
    between: Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]] = ()
    export_check: Mapping[str, Any] | None = None
    lm_eval: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    coverage: Mapping[str, Any] | None = None
    read_unix: float = dataclasses.field(default_factory=time.time)

    @property
    def num_steps(self) -> int:
        """Number of finished training steps."""
        return len(self.rows)

    @property
    def has_partial_credit(self) -> bool:
        """Whether held-out rewards differ from the pass rate."""
        return any(result is not None and result.get("has_partial_credit") for result in (self.before, self.after))

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Return (steps, values) of one metric, for the steps that have it."""
        rows = [row for row in self.rows if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def values(self, name: str) -> list[float]:
        """Return the values of one metric."""
        return self.column(name)[1]


def read_run(inputs: ReportInputs) -> RunData:
    """Read a finished run.

    Raises:
        CheckpointError: A file is missing or damaged, or the metrics do not contain each step exactly once.
    """
    config = load_resolved(inputs.config)
    origins = read_origins(inputs.config.read_text(encoding="utf-8"))
    return _read(inputs, Resolved(config, origins, inputs.run_folder.name))


def read_run_so_far(paths: Paths, logs: Path, running_since: float | None) -> RunData:
    """Read a run before, during or after its training; `missing` names what does not exist yet.

    Args:
        paths: Paths of the run. If the run has not written its configuration yet, the resolved one is used.
        logs: Folder with one folder per rule.
        running_since: Start of the process that trains the run; None if none does.

    Raises:
        CheckpointError: A file is damaged.
    """
    config, export = paths.config, receipt_of(paths.hf_export)
    before, after = (paths.evaluation(when) for when in ("before", "after"))
    inputs = ReportInputs(config, paths.run, before, after, export, logs)
    resolved = paths.resolved
    if config.exists():
        resolved = Resolved(load_resolved(config), read_origins(config.read_text(encoding="utf-8")), paths.run.name)
    parts = {
        "the evaluation before training": inputs.before,
        "the end of training": paths.train_done,
        "the export": export,
        "the evaluation after training": inputs.after,
    }
    run = _read(inputs, resolved, missing=[name for name, path in parts.items() if not path.exists()])
    if running_since is None:
        return run
    begin = max(running_since, *(row["ended_unix"] for row in run.attempts)) if run.attempts else running_since
    going_on = {"attempt": "", "started_unix": begin, "ended_unix": run.read_unix, "reason": "goes on"}
    return dataclasses.replace(run, attempts=[*run.attempts, going_on])


def _read(inputs: ReportInputs, resolved: Resolved, missing: Sequence[str] = ()) -> RunData:
    paths, train = Paths(resolved), inputs.run_folder / "train"
    # Keep this order, because training may end while we read.
    is_done = (train / "done.json").exists() or not missing
    rows = read_rows(train / "metrics.jsonl")
    if is_done:
        _check_complete(train / "metrics.jsonl", rows, read_receipt(train / "done.json").settings["num_steps"])
    evaluations = [_read_evaluation(path, missing) for path in (inputs.before, inputs.after)]
    # Leave out the artefact of an earlier report.
    artefacts = [found for found in find_artefacts(paths) if found.receipt_path != receipt_of(paths.report)]
    return RunData(
        config=resolved.config,
        origins=resolved.origins,
        run_name=inputs.run_folder.name,
        run_folder=inputs.run_folder,
        rows=rows,
        before=evaluations[0],
        after=evaluations[1],
        attempts=_read_json_lines(train / "attempts.jsonl"),
        times=rule_times(inputs.logs, paths, artefacts),
        artefacts=artefacts,
        lineage=_lineage_of(artefacts),
        final_weights_sha256=_final_weights(inputs.export_receipt, missing),
        commit=git_commit(Path.cwd()),
        versions=package_versions(),
        missing=missing,
        between=_read_between(train / "evaluations"),
        # Runs of older versions have no such files.
        data_check=read_json(paths.data_check) if paths.data_check.exists() else None,
        environment_check=read_json(paths.environment_check) if paths.environment_check.exists() else None,
        export_check=read_json(paths.export_check) if receipt_of(paths.export_check).exists() else None,
        lm_eval={when: read_json(path) for when, path in _lm_eval_results(paths).items()},
        coverage=read_json(paths.coverage) if receipt_of(paths.calibration).exists() else None,
    )


def _read_evaluation(path: Path, missing: Sequence[str]) -> dict[str, Any] | None:
    return None if missing and not path.exists() else _read_json(path, {"pass_rate", "num_prompts", "examples"})


def _read_between(folder: Path) -> list[tuple[int, Mapping[str, Mapping[str, Any]]]]:
    """Return (finished steps, suite -> result) of the evaluations between steps."""
    found = [_read_json(path, {"finished", "exams"}) for path in sorted(folder.glob("step_*.json"))]
    return [(int(one["finished"]), one["exams"]) for one in found]


def _lm_eval_results(paths: Paths) -> dict[str, Path]:
    """Return lm-eval's results, if it ran and its receipt matches them."""
    found = {when: paths.lm_eval(when) for when in ("before", "after")}
    return {when: path for when, path in found.items() if receipt_of(path).exists()}


def _final_weights(receipt: Path, missing: Sequence[str]) -> str | None:
    if missing and not receipt.exists():
        return None
    export = read_receipt(receipt)
    if "final_weights_sha256" not in export.settings:
        raise CheckpointError(
            "receipt-without-digest", f"{receipt}: its settings hold no final_weights_sha256; export again"
        )
    return export.settings["final_weights_sha256"]


def read_origins(resolved_yaml: str) -> dict[str, str]:
    """Return dotted key -> origin from the comments of a `config.resolved.yaml`.

    Example:
        "optimizer:\\n  lr: 0.0002  # config/models/tiny.yaml\\n" -> {"optimizer.lr":
        "config/models/tiny.yaml"}.
    """
    origins: dict[str, str] = {}
    parents: list[str] = []
    for line in resolved_yaml.splitlines():
        match = re.match(r"(?P<indent> *)(?P<key>\w+):(?: (?P<value>.*))?$", line)
        if match is None:
            continue
        parents = [*parents[: len(match["indent"]) // 2], match["key"]]
        _, mark, origin = (match["value"] or "").rpartition("  # ")
        if mark:
            origins[".".join(parents)] = origin
    return origins


def flat_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of a configuration, in the schema's order."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            flat |= flat_config(value, f"{key}.")
        elif isinstance(value, dict):
            for name, row in value.items():
                flat |= flat_config(row, f"{key}.{name}.")
        else:
            flat[key] = value
    return flat


def rule_times(logs: Path, paths: Paths, artefacts: Sequence[Artifact]) -> list[RuleTime]:
    """Return the duration of each job from Snakemake's benchmark files, or else from the history in a receipt."""
    times = [_read_benchmark(path) for path in sorted(logs.glob("*/*.benchmark.tsv")) if _belongs_to(path, paths)]
    measured = {time.rule for time in times}
    for artefact in artefacts:
        if artefact.receipt is not None and rule_of(artefact.receipt.step) not in measured:
            times += _read_history(artefact)
    return times


def git_commit(folder: Path) -> str:
    """Return the commit of the checkout that contains `folder`, marked if files differ; "" outside a checkout."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        # No git, or no checkout: an installed package has a version instead of a commit.
        return ""
    return f"{commit} (with local changes)" if changed else commit


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    versions = {"posttrain": __version__, "python": sys.version.split()[0]}
    for name in SHOWN_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _lineage_of(artefacts: Sequence[Artifact]) -> Sequence[Mapping[str, Any]]:
    """Return the runs that a run was forked from, the oldest first: "run", "step" and what was "changed"."""
    receipts = [artefact.receipt for artefact in artefacts if artefact.receipt is not None]
    return next((receipt.settings["lineage"] for receipt in receipts if receipt.step == "fork_checkpoint"), [])


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _check_complete(path: Path, rows: Sequence[Mapping[str, float]], num_steps: int) -> None:
    steps = [int(row["step"]) for row in rows]
    if len(steps) != num_steps or steps != list(range(steps[0], steps[0] + num_steps)):
        found = f"{len(steps)} rows" + (f", steps {steps[0]} to {steps[-1]}" if steps else "")
        raise CheckpointError(
            "metrics-incomplete", f"{path}: {found}; done.json says {num_steps} steps; restore the file or train again"
        )


def _belongs_to(path: Path, paths: Paths) -> bool:
    """Return whether a benchmark file is this run's, or its model's in the store."""
    job = path.name.removesuffix(".benchmark.tsv")
    run = paths.run
    siblings = [other.name for other in run.parent.glob("*") if other.is_dir() and other.name != run.name]
    store_name = f"{paths.resolved.config.model.name}-{paths.revision12}"
    if any(_starts_with_name(job, other) and len(other) > len(run.name) for other in siblings):
        return _starts_with_name(job, store_name)
    return _starts_with_name(job, run.name) or _starts_with_name(job, store_name)


def _starts_with_name(job: str, name: str) -> bool:
    return job == name or (job.startswith(name) and job[len(name)] in ".-_")


def _read_benchmark(path: Path) -> RuleTime:
    with open(path, newline="", encoding="utf-8") as file:
        row = list(csv.DictReader(file, delimiter="\t"))[-1]
    rss = row.get("max_rss", "-")
    return RuleTime(
        rule=rule_of(path.parent.name),
        job=path.name.removesuffix(".benchmark.tsv"),
        seconds=float(row["s"]),
        finished_unix=path.stat().st_mtime,
        max_rss_mb=float(rss) if float(row["s"]) >= SAMPLED_SECONDS and re.fullmatch(r"[0-9.]+", rss) else None,
    )


def _read_history(artefact: Artifact) -> list[RuleTime]:
    path = artefact.receipt_path
    history = _read_json_lines(path.with_name(path.name.removesuffix(".receipt.json") + ".history.jsonl"))
    last = history[-1] if history else {}
    if last.get("seconds") is None:
        return []
    return [RuleTime(rule_of(last["step"]), artefact.name, last["seconds"], last["finished_unix"], None)]


def _read_json(path: Path, required: set[str]) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "result-unreadable", f"{path}: cannot be read ({error}); run the step that writes it again"
        ) from error
    if missing := required - set(content):
        raise CheckpointError(
            "result-incomplete", f"{path}: has no {', '.join(sorted(missing))}; run the step that writes it again"
        )
    return content


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an append-only log, without a last line that a kill truncated."""
    if not path.exists():
        return []
    try:
        return [parse_json(line) for line in path.read_bytes().split(b"\n")[:-1] if line]
    except ValueError as error:
        raise CheckpointError(
            "metrics-invalid", f"{path}: cannot be read ({error}); restore the file from a copy"
        ) from error

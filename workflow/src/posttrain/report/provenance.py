"""Finds every artefact of a run that has a receipt, from the source to the evaluation.

A receipt contains the digests of its inputs; `checkpoint.verification` follows them and reads the files again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import CheckpointError
from posttrain.store import (
    MANIFEST_NAME,
    FileRecord,
    Paths,
    Receipt,
    part_receipt_of,
    partial_of,
    read_json,
    read_receipt,
    read_records,
    receipt_of,
    record_files,
    sync_tree,
)

# What training writes for people to read; of a W&B run, everything but its logs.
RECORDS = (
    *("train/metrics.jsonl", "train/attempts.jsonl", "train/evaluations/step_*.json", "node_local/*.json"),
    *("train/wandb/*run-*/*.wandb", "train/wandb/*run-*/files/**/*"),
)


@dataclass(frozen=True)
class Artifact:
    """A folder that a step wrote, or one part of it.

    Args:
        name: Short name: "hf", "torch_dist part 0", "node0: rollout_fp8".
        folder: The folder of its files.
        receipt_path: Its receipt, or the record that replaces one.
        receipt: The receipt's content; None if it cannot be read (see `damage`).
        damage: Why the receipt cannot be used; "" if it can.
        is_whole_folder: The folder may contain only what its receipt lists.
    """

    name: str
    folder: Path
    receipt_path: Path
    receipt: Receipt | None
    damage: str = ""
    is_whole_folder: bool = True


def record_run(run: Path) -> tuple[FileRecord, ...]:
    """Return the records of what training wrote for people to read, apart from checkpoints.

    Args:
        run: The run's folder; names are relative to it.
    """
    if (logs := run / "train" / "wandb").is_dir():
        sync_tree(logs)  # W&B does not
    found = [path for pattern in RECORDS for path in run.glob(pattern) if path.is_file() and not path.is_symlink()]
    return record_files(run, (path.relative_to(run).as_posix() for path in found))


def find_artefacts(paths: Paths) -> list[Artifact]:
    """Return every artefact of the run whose receipt exists, from the source to the export.

    Args:
        paths: Of the run. Receipts below its folder are found wherever they lie.
    """
    return [*find_store_artefacts(paths), *_find_run_artefacts(paths)]


def find_store_artefacts(paths: Paths) -> list[Artifact]:
    """Return the artefacts that do not depend on a run; of an unfinished one, its finished parts."""
    folders = [(name, folder) for name, folder in paths.store_artefacts.items() if name not in _of_the_run(paths)]
    if (source := paths.resolved.config.model.source).kind == "run":
        folders.insert(0, (f"run {source.run}: hf", paths.source_export))
    return [artefact for name, folder in folders for artefact in _artefacts_of(name, folder)]


def _find_run_artefacts(paths: Paths) -> list[Artifact]:
    found = []
    if paths.train_done.exists():
        # Training's receipt has its own name; its checkpoints share a folder with other files of the run.
        found.append(_load("train", paths.train, paths.train_done, False))
    finals = [paths.train / str(train.receipt.settings.get("final_checkpoint")) for train in found if train.receipt]
    if not receipt_of(paths.hf_export).exists():
        found += _artefacts_of("run: hf", paths.hf_export)
    found += _artefacts_of("export_fp8", paths.export_fp8)
    for name, folder in _of_the_run(paths).items():
        found += _artefacts_of(name, folder)
    kept = sorted(paths.checkpoints.glob(f"step_*[0-9]/{MANIFEST_NAME}"))
    found += [_kept_checkpoint(path) for path in kept if path.parent not in finals]
    for receipt_path in sorted(paths.run.rglob("*.receipt.json")):
        if receipt_path.parent.suffix == ".parts" or receipt_path.parent == paths.evaluation("").parent:
            continue
        folder = receipt_path.with_name(receipt_path.name.removesuffix(".receipt.json"))
        name = f"run: {folder.relative_to(paths.run).as_posix()}"
        # If a step's result is a single file, the receipt is next to that file.
        whole = folder.is_dir()
        found.append(_load(name, folder if whole else receipt_path.parent, receipt_path, whole))
    copies = _find_copies(paths, find_store_artefacts(paths))
    return [*found, *copies, *_find_evaluations(paths)]


def _of_the_run(paths: Paths) -> dict[str, Path]:
    """Return the serving artefacts of the run's trained weights; they lie in the store but belong to the run."""
    is_trained = paths.resolved.config.serving.weights == "trained"
    return {"calibration": paths.calibration, "serving": paths.serving} if is_trained else {}


def _kept_checkpoint(manifest: Path) -> Artifact:
    """Return a checkpoint of training; it may be forked as long as it is kept."""
    name = f"checkpoint {manifest.parent.name}"
    try:
        receipt = Receipt("train_grpo", read_records(manifest), {}, {})
    except CheckpointError as error:
        return Artifact(name, manifest.parent, manifest, None, str(error))
    return Artifact(name, manifest.parent, manifest, receipt)


def _artefacts_of(name: str, folder: Path) -> list[Artifact]:
    """Return a folder's artefact, or its finished parts while it is unfinished."""
    if receipt_of(folder).exists():
        return [_load(name, folder, receipt_of(folder))]
    receipts = sorted(part_receipt_of(folder, 0).parent.glob("*.receipt.json"))
    where = folder if folder.is_dir() else partial_of(folder)
    return [_load(f"{name} part {path.name.split('.')[0]}", where, path, False) for path in receipts]


def _find_copies(paths: Paths, origins: Iterable[Artifact]) -> Iterator[Artifact]:
    """Yield the node-local copies that this machine can see, with the receipt of their origin."""
    receipts = {origin.receipt.digest: origin for origin in origins if origin.receipt is not None}
    for record in sorted(paths.run.glob("node_local/*.json")):
        try:
            row = read_json(record)
            node, is_here = str(row["node"]), Path(row["folder"]).is_dir()
            copies = [(Path(copy["folder"]), str(copy["receipt_digest"])) for copy in row["copies"] if is_here]
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{record}: not a record of what a node holds ({error!r}); stage again"
            yield Artifact(record.stem, record.parent, record, None, why)
            continue
        for folder, digest in copies:
            if origin := receipts.get(digest):
                yield Artifact(f"{node}: {origin.name}", folder, record, origin.receipt, "", False)
            else:
                why = f"{record}: {folder} was copied from {digest[:12]}, which nothing on disk has"
                yield Artifact(f"{node}: {folder.name}", folder, record, None, why)


def _find_evaluations(paths: Paths) -> Iterator[Artifact]:
    """Yield the evaluations, then lm-eval's. Earlier versions wrote no receipts; their results name the model."""
    for path in (paths.evaluation("before"), paths.evaluation("after")):
        name = f"evaluation {path.stem}"
        if receipt_of(path).exists():
            yield _load(name, path.parent, receipt_of(path), False)
        elif path.exists():
            try:
                receipt = Receipt("evaluate", (), dict(read_json(path)["inputs"]), {})
                yield Artifact(name, path.parent, path, receipt, "", False)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"{path}: not the result of an evaluation ({error!r}); delete it, and it is made again"
                yield Artifact(name, path.parent, path, None, why)
    for path in (paths.lm_eval("before"), paths.lm_eval("after")):
        if receipt_of(path).exists():
            yield _load(f"evaluation {path.stem}", path.parent, receipt_of(path), False)


def _load(name: str, folder: Path, receipt_path: Path, is_whole_folder: bool = True) -> Artifact:
    try:
        return Artifact(name, folder, receipt_path, read_receipt(receipt_path), "", is_whole_folder)
    except CheckpointError as error:
        return Artifact(name, folder, receipt_path, None, str(error))

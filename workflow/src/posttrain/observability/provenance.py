"""What a run consists of: every artefact that has a receipt, from the source to the evaluation.

A receipt names the digests of what it was made from; `checkpoint.verification` follows them and reads the files again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts import (
    Paths,
    Receipt,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
)
from posttrain.errors import CheckpointError


@dataclass(frozen=True)
class Artefact:
    """A folder that a step made, or one part of it.

    Args:
        name: Short name: "hf", "torch_dist part 0", "node0: rollout_fp8".
        folder: Where its files lie.
        receipt_path: Its receipt, or the record that stands for one.
        receipt: The receipt's content; None when it cannot be read, and `damage` says why.
        damage: Why the receipt cannot be used; "" when it can.
        is_whole_folder: Its receipt lists all that may lie in the folder.
    """

    name: str
    folder: Path
    receipt_path: Path
    receipt: Receipt | None
    damage: str = ""
    is_whole_folder: bool = True


def find_artefacts(paths: Paths) -> list[Artefact]:
    """Return every artefact of the run whose receipt exists, from the source to the export.

    Args:
        paths: Of the run. Receipts below its folder are found wherever they lie.
    """
    return [*find_store_artefacts(paths), *_find_run_artefacts(paths)]


def find_store_artefacts(paths: Paths) -> list[Artefact]:
    """Return the artefacts that do not depend on a run; of unfinished ones the finished parts."""
    return [artefact for name, folder in paths.store_artefacts.items() for artefact in _artefacts_of(name, folder)]


def _find_run_artefacts(paths: Paths) -> list[Artefact]:
    found = []
    if paths.train_done.exists():
        # Training's receipt has a name of its own; its checkpoints lie beside other files of the run.
        found.append(_load("train", paths.train, paths.train_done, False))
    if not receipt_of(paths.hf_export).exists():
        found += _artefacts_of("run: hf", paths.hf_export)
    for receipt_path in sorted(paths.run.rglob("*.receipt.json")):
        if receipt_path.parent.suffix == ".parts":
            continue
        folder = receipt_path.with_name(receipt_path.name.removesuffix(".receipt.json"))
        name = f"run: {folder.relative_to(paths.run).as_posix()}"
        # A step whose result is a single file has its receipt beside that file.
        whole = folder.is_dir()
        found.append(_load(name, folder if whole else receipt_path.parent, receipt_path, whole))
    copies = _find_copies(paths, find_store_artefacts(paths))
    return [*found, *copies, *_find_evaluations(paths)]


def _artefacts_of(name: str, folder: Path) -> list[Artefact]:
    """Return a folder's artefact; while it is not finished, the parts that are."""
    if receipt_of(folder).exists():
        return [_load(name, folder, receipt_of(folder))]
    receipts = sorted(part_receipt_of(folder, 0).parent.glob("*.receipt.json"))
    where = folder if folder.is_dir() else partial_of(folder)
    return [_load(f"{name} part {path.name.split('.')[0]}", where, path, False) for path in receipts]


def _find_copies(paths: Paths, origins: Iterable[Artefact]) -> Iterator[Artefact]:
    """Yield the copies on nodes' own disks that this machine can see, with their origin's receipt."""
    receipts = {origin.receipt.digest: origin for origin in origins if origin.receipt is not None}
    for testimony in sorted(paths.run.glob("node_local/*.json")):
        row = json.loads(testimony.read_text(encoding="utf-8"))
        for copy in row["copies"] if Path(row["folder"]).is_dir() else ():
            folder = Path(copy["folder"])
            origin = receipts.get(copy["receipt_digest"])
            if origin is None:
                digest = copy["receipt_digest"][:12]
                why = f"{testimony}: {folder} was copied from {digest}, which nothing on disk has"
                yield Artefact(f"{row['node']}: {folder.name}", folder, testimony, None, why)
            else:
                yield Artefact(f"{row['node']}: {origin.name}", folder, testimony, origin.receipt, "", False)


def _find_evaluations(paths: Paths) -> Iterator[Artefact]:
    """Yield the evaluations: results without files, whose record names what was evaluated."""
    for path in (paths.evaluation("before"), paths.evaluation("after")):
        if path.exists():
            row = json.loads(path.read_text(encoding="utf-8"))
            receipt = Receipt("evaluate", (), row.get("inputs", {}), {})
            yield Artefact(f"evaluation {path.stem}", path.parent, path, receipt, "", False)


def _load(name: str, folder: Path, receipt_path: Path, is_whole_folder: bool = True) -> Artefact:
    try:
        return Artefact(name, folder, receipt_path, read_receipt(receipt_path), "", is_whole_folder)
    except CheckpointError as error:
        return Artefact(name, folder, receipt_path, None, str(error))

"""Where every byte of a run came from: receipts, the chain of their digests, and the files themselves.

A receipt names the digests of what it was made from. The chain holds when each of those is the digest of a
receipt on disk, from the evaluation of the trained model back to the source. No name and no date is trusted.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.artifacts import (
    Paths,
    Receipt,
    check_files,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
)
from posttrain.errors import CheckpointError
from posttrain.observability.progress import ProgressBar

NUM_HASH_THREADS = 4


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


@dataclass(frozen=True)
class Verdict:
    """What was found about one artefact.

    Args:
        artefact: The artefact.
        problems: One line for each thing that is wrong; empty when all is well.
    """

    artefact: Artefact
    problems: list[str] = field(default_factory=list)


def find_artefacts(paths: Paths) -> list[Artefact]:
    """Return every artefact of the run whose receipt exists, from the source to the export.

    Args:
        paths: Of the run. Receipts below its folder are found wherever they lie.
    """
    folders = {
        "made model": paths.made_model,
        "dataset": paths.dataset,
        "hf": paths.hf,
        "hf_patched": paths.hf_patched,
        "torch_dist": paths.torch_dist,
        "rollout_fp8": paths.rollout_fp8,
        "serving": paths.serving,
        "bf16": paths.bf16,
    }
    found = [artefact for name, folder in folders.items() for artefact in _artefacts_of(name, folder)]
    if paths.train_done.exists():
        # Training's receipt has a name of its own; its checkpoints lie beside other files of the run.
        found.append(_load("train", paths.train, paths.train_done, False))
    for receipt_path in sorted(paths.run.rglob("*.receipt.json")):
        folder = receipt_path.with_name(receipt_path.name.removesuffix(".receipt.json"))
        name = f"run: {folder.relative_to(paths.run).as_posix()}"
        # A step whose result is a single file has its receipt beside that file.
        whole = folder.is_dir()
        found.append(_load(name, folder if whole else receipt_path.parent, receipt_path, whole))
    return [*found, *_find_copies(paths, found), *_find_evaluations(paths)]


def verify(paths: Paths, content: bool = True) -> list[Verdict]:
    """Check every artefact of a run: receipt, chain of digests, each file, and that there are no other files.

    Args:
        paths: Of the run.
        content: Read every byte; otherwise only names and sizes are compared.
    """
    artefacts = find_artefacts(paths)
    known = {artefact.receipt.digest for artefact in artefacts if artefact.receipt is not None}
    verdicts = [Verdict(artefact, [artefact.damage] if artefact.damage else []) for artefact in artefacts]
    for verdict in verdicts:
        if verdict.artefact.receipt is not None:
            verdict.problems.extend(_broken_links(verdict.artefact, known))
            verdict.problems.extend(_other_experiment(verdict.artefact, paths))
            verdict.problems.extend(_unlisted_files(verdict.artefact))
    _check_all_files([verdict for verdict in verdicts if verdict.artefact.receipt is not None], content)
    return verdicts


def describe(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Return what was verified as plain JSON types."""
    rows = [
        {
            "name": verdict.artefact.name,
            "folder": str(verdict.artefact.folder),
            "step": receipt.step,
            "digest": receipt.digest,
            "inputs": dict(receipt.inputs),
            "num_files": len(receipt.files),
            "size_bytes": receipt.size_bytes,
            "problems": verdict.problems,
        }
        for verdict in verdicts
        if (receipt := verdict.artefact.receipt) is not None
    ]
    return {"num_files": sum(row["num_files"] for row in rows), "artefacts": rows}


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """Print one row per artefact on stdout."""
    table = Table("artefact", "step", show_edge=False, header_style="bold")
    table.add_column("files", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for verdict in verdicts:
        receipt, count = verdict.artefact.receipt, len(verdict.problems)
        state = f"[bold red]{count} problem{'s' if count > 1 else ''}[/]" if count else "[green]ok[/]"
        known = (receipt.step, f"{len(receipt.files):,}", f"{receipt.size_bytes:,}") if receipt else ("?", "?", "?")
        table.add_row(verdict.artefact.name, *known, state)
    Console(width=110).print(table)


def raise_bad_files(verdicts: Iterable[Verdict]) -> None:
    """Raise when anything is wrong.

    Raises:
        CheckpointError: Naming every bad file, receipt and link.
    """
    if problems := [problem for verdict in verdicts for problem in verdict.problems]:
        listed = "\n  ".join(problems)
        raise CheckpointError(f"not what the receipts say ({len(problems)}):\n  {listed}")


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


def _broken_links(artefact: Artefact, known: Set[str]) -> list[str]:
    assert artefact.receipt is not None
    return [
        f"{artefact.receipt_path}: made from {name} {digest[:12]}, which nothing on disk has"
        for name, digest in artefact.receipt.inputs.items()
        if digest not in known
    ]


def _other_experiment(artefact: Artefact, paths: Paths) -> list[str]:
    """Tell when training was done with another experiment than the run's folder states."""
    assert artefact.receipt is not None
    trained_with = artefact.receipt.settings.get("experiment")
    if artefact.receipt.step != "train_grpo" or trained_with == paths.experiment.read_text(encoding="utf-8"):
        return []
    return [f"{artefact.receipt_path}: trained with another experiment than {paths.experiment} states"]


def _unlisted_files(artefact: Artefact) -> list[str]:
    """Name files in an artefact's folder that its receipt does not: nobody knows where they came from."""
    if not artefact.is_whole_folder:
        return []
    assert artefact.receipt is not None
    listed = {record.path for record in artefact.receipt.files}
    found = {path.relative_to(artefact.folder).as_posix() for path in artefact.folder.rglob("*") if path.is_file()}
    return [f"{artefact.folder / name}: not in the receipt" for name in sorted(found - listed)]


def _check_all_files(verdicts: list[Verdict], content: bool) -> None:
    """Compare the files of all artefacts, several at a time, and add what is wrong to the verdicts."""
    jobs = []
    for verdict in verdicts:
        receipt = verdict.artefact.receipt
        assert receipt is not None
        jobs += [(verdict, dataclasses.replace(receipt, files=(record,))) for record in receipt.files]
    total = sum(receipt.size_bytes for _, receipt in jobs)
    with (
        ProgressBar("verify", total) as progress,
        ThreadPoolExecutor(min(NUM_HASH_THREADS, os.cpu_count() or 1)) as pool,
    ):
        checks = pool.map(lambda job: check_files(job[0].artefact.folder, job[1], content), jobs)
        for (verdict, receipt), problems in zip(jobs, checks, strict=True):
            verdict.problems.extend(problems)
            progress.advance(receipt.size_bytes, verdict.artefact.name)

"""Verifies the provenance of every byte: reads each artefact again, and follows each link to the source.

A link is the digest of a receipt in another receipt. The chain ends at the Hub's list of files, whose SHA-256 is also
compared, at a local folder, at a step that generates its output from a seed, or at another run's export, which has its
own chain. A missing receipt or file is an error. Names and dates are not trusted. Files of the run without a receipt
are counted at the end. Receipts that were rewritten consistently are not detected: users with write access are trusted.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.checkpoint.formats.torch_dist_reader import METADATA_NAME, TorchDistReader
from posttrain.checkpoint.hub.source_check import check_source
from posttrain.checkpoint.staging.file_placement import hash_twice
from posttrain.errors import CheckpointError, one_line
from posttrain.report.progress import ProgressBar
from posttrain.report.provenance import Artifact, find_artefacts, find_store_artefacts
from posttrain.store import MANIFEST_NAME, FileRecord, Paths, hash_file, read_json, receipt_of

# Enough for hashing to keep up with reads; more would compete for shared storage.
NUM_HASH_THREADS = 8


@dataclass(frozen=True)
class Verdict:
    """Result for one artefact.

    Args:
        artefact: The artefact.
        made_from: One line per link: name and digest of an input with its artefact, or the source.
        problems: One line per problem; empty if there are none.
    """

    artefact: Artifact
    made_from: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify(paths: Paths, content: bool = True, whole_run: bool = True) -> list[Verdict]:
    """Check every artefact: receipt, links and files, and that there are no other files and no gaps.

    Args:
        paths: Paths of the run.
        content: Read every byte; otherwise compare only names and sizes.
        whole_run: Check up to the trained model; otherwise only the inputs of training.
    """
    artefacts = find_artefacts(paths) if whole_run else find_store_artefacts(paths)
    building = {a.folder for a in artefacts if a.folder.name.endswith(".partial") and a.folder.is_dir()}
    artefacts += _find_gaps(paths, artefacts, whole_run)
    known = {artefact.receipt.digest: artefact.name for artefact in artefacts if artefact.receipt is not None}
    verdicts = [Verdict(a, problems=[a.damage] if a.damage else []) for a in artefacts]
    readable = [verdict for verdict in verdicts if verdict.artefact.receipt is not None]
    for verdict in readable:
        if verdict.artefact.receipt_path == receipt_of(paths.source_export):
            verdict.made_from.append(f"{paths.source_export.parent}: `posttrain verify` of that run goes on")
        else:
            _follow_links(verdict, known)
        verdict.problems.extend(_unlike_run(verdict.artefact, paths))
        verdict.problems.extend(_unlisted_files(verdict.artefact))
    _check_files(readable, content)
    for verdict in readable:
        verdict.problems.extend(_doubtful_record(verdict))
    if not all(folder.is_dir() for folder in building):
        # A step has just finished one: its files have been renamed, and its receipt covers all of them.
        return verify(paths, content, whole_run)
    return verdicts


def prove(paths: Paths, content: bool = True, whole_run: bool = True) -> dict[str, Any]:
    """Verify, print the results, and return them as plain JSON types; see `verify`.

    Raises:
        CheckpointError: Files, receipts or links are wrong; lists each.
    """
    verdicts = verify(paths, content, whole_run)
    print_verdicts(verdicts)
    uncovered = find_uncovered(paths, verdicts) if whole_run else []
    if uncovered:
        print(f"not looked at, because no receipt names them: {_count_by_folder(uncovered)}")
    raise_bad_files(verdicts)
    verified = describe(verdicts)
    print(f"{verified['num_files']} files are what their receipts say")
    return {**verified, "not_covered": uncovered}


def find_uncovered(paths: Paths, verdicts: Iterable[Verdict]) -> list[str]:
    """Return the files of the run without a receipt, relative to its folder: logs, leases, old records."""
    covered = {paths.experiment}
    for artefact in (verdict.artefact for verdict in verdicts):
        if artefact.receipt is not None:
            covered |= {artefact.folder / record.path for record in artefact.receipt.files}
        # Results and node records are excluded, because they only name the location of the rest.
        if artefact.receipt_path.name.endswith((".receipt.json", paths.train_done.name, MANIFEST_NAME)):
            covered.add(artefact.receipt_path)
    if paths.train_done in covered:
        covered.add(paths.begun_from)
    found = {path for path in paths.run.rglob("*") if path.is_file()} - covered
    return sorted(path.relative_to(paths.run).as_posix() for path in found)


def _count_by_folder(names: Iterable[str]) -> str:
    counts = Counter(one_line("/".join(name.split("/")[:-1][:2]) or name) for name in names)
    return ", ".join(f"{name} ({count} file{'s' if count > 1 else ''})" for name, count in sorted(counts.items()))


def describe(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Return the verified artefacts as plain JSON types."""
    rows = [
        {
            "name": verdict.artefact.name,
            "folder": str(verdict.artefact.folder),
            "step": receipt.step,
            "digest": receipt.digest,
            "inputs": dict(receipt.inputs),
            "made_from": verdict.made_from,
            "num_files": len(receipt.files),
            "size_bytes": receipt.size_bytes,
            "problems": verdict.problems,
        }
        for verdict in verdicts
        if (receipt := verdict.artefact.receipt) is not None
    ]
    return {"num_files": sum(row["num_files"] for row in rows), "artefacts": rows}


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """Print one row per artefact, with its links, to stdout."""
    table = Table("artefact", "digest", "made from", show_edge=False, header_style="bold")
    table.add_column("files", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for verdict in verdicts:
        receipt, count = verdict.artefact.receipt, len(verdict.problems)
        state = f"[bold red]{count} problem{'s' if count > 1 else ''}[/]" if count else "[green]ok[/]"
        counts = (f"{len(receipt.files):,}", f"{receipt.size_bytes:,}") if receipt else ("?", "?")
        digest = receipt.digest[:12] if receipt else "?"
        table.add_row(verdict.artefact.name, digest, "\n".join(verdict.made_from), *counts, state)
    Console(width=140).print(table)


def raise_bad_files(verdicts: Iterable[Verdict]) -> None:
    """Raise if there are problems.

    Raises:
        CheckpointError: Files, receipts or links are wrong; lists each.
    """
    if problems := [problem for verdict in verdicts for problem in verdict.problems]:
        listed = "\n  ".join(problems)
        raise CheckpointError("receipt-mismatch", f"not what the receipts say ({len(problems)}):\n  {listed}")


# ---- the chain ----


def _find_gaps(paths: Paths, found: Iterable[Artifact], whole_run: bool) -> Iterator[Artifact]:
    """Yield the artefacts that must have a receipt but have none."""
    store = [paths.dataset, paths.hf, paths.hf_patched, paths.torch_dist, paths.rollout_weights]
    made = [paths.source_folder] if paths.resolved.config.model.source.kind in ("made", "run") else []
    needed = [receipt_of(folder) for folder in (*made, *store)]
    needed += [paths.train_done, receipt_of(paths.hf_export)] if whole_run else []
    there = {artefact.receipt_path for artefact in found}
    for receipt in dict.fromkeys(needed):
        if receipt not in there:
            name = "train" if receipt == paths.train_done else receipt.name.removesuffix(".receipt.json")
            yield Artifact(
                name, receipt.parent, receipt, None, f"{receipt}: missing: nothing proves what it stands for"
            )


def _follow_links(verdict: Verdict, known: Mapping[str, str]) -> None:
    artefact = verdict.artefact
    assert artefact.receipt is not None
    for name, digest in artefact.receipt.inputs.items():
        verdict.made_from.append(f"{name} {digest[:12]} = {known.get(digest, 'nothing on disk')}")
        if digest not in known:
            verdict.problems.append(
                f"{artefact.receipt_path}: made from {name} {digest[:12]}, which nothing on disk has"
            )
    if not artefact.receipt.inputs:
        source, problems = check_source(artefact)
        verdict.made_from.append(source)
        verdict.problems.extend(problems)


def _unlike_run(artefact: Artifact, paths: Paths) -> Iterator[str]:
    """Yield differences between the experiment of training and that of the run's folder."""
    if artefact.receipt_path != paths.train_done:
        return
    assert artefact.receipt is not None
    try:
        if artefact.receipt.settings.get("experiment") != paths.experiment.read_text(encoding="utf-8"):
            yield f"{artefact.receipt_path}: trained with another experiment than {paths.experiment} states"
    except (OSError, ValueError) as error:
        yield f"{paths.experiment}: cannot be read ({error})"
    try:
        if read_json(paths.begun_from) != dict(artefact.receipt.inputs):
            yield f"{artefact.receipt_path}: begun with other inputs than {paths.begun_from} states"
    except (OSError, ValueError) as error:
        yield f"{paths.begun_from}: cannot be read ({error})"


def _unlisted_files(artefact: Artifact) -> list[str]:
    """Return the files in an artefact's folder that its receipt omits: their origin is unknown."""
    if not artefact.is_whole_folder:
        return []
    assert artefact.receipt is not None
    listed = {artefact.folder / record.path for record in artefact.receipt.files}
    found = {path for path in artefact.folder.rglob("*") if path.is_file()}
    return [f"{one_line(path)}: not in the receipt" for path in sorted(found - listed - {artefact.receipt_path})]


def _doubtful_record(verdict: Verdict) -> Iterator[str]:
    """Yield a checkpoint's manifest if its files differ: without a digest, either of them may have changed."""
    if verdict.problems and verdict.artefact.receipt_path.name == MANIFEST_NAME:
        yield f"{verdict.artefact.receipt_path}: either this was changed, or what differs from it"


# ---- the files ----


def _check_files(verdicts: Iterable[Verdict], content: bool) -> None:
    """Compare all files with their receipts; a file with several names is read once."""
    to_read: dict[tuple[int, int], list[tuple[Verdict, FileRecord]]] = {}
    for verdict in verdicts:
        assert verdict.artefact.receipt is not None
        for record in verdict.artefact.receipt.files:
            path = verdict.artefact.folder / record.path
            if problem := _wrong_size(path, record):
                verdict.problems.append(problem)
            elif content:
                status = path.stat()
                to_read.setdefault((status.st_dev, status.st_ino), []).append((verdict, record))
    total = sum(rows[0][1].size_bytes for rows in to_read.values())
    with (
        ProgressBar("verify", total) as progress,
        ThreadPoolExecutor(min(NUM_HASH_THREADS, os.cpu_count() or 1)) as pool,
    ):
        for rows, damages in zip(to_read.values(), pool.map(_compare, to_read.values()), strict=True):
            for (verdict, _), damage in zip(rows, damages, strict=True):
                verdict.problems.extend(damage)
            progress.advance(rows[0][1].size_bytes, rows[0][0].artefact.name)


def _wrong_size(path: Path, record: FileRecord) -> str:
    if not path.is_file():
        return f"{path}: missing, expected {record.size_bytes} bytes"
    found = path.stat().st_size
    return "" if found == record.size_bytes else f"{path}: {found} bytes, expected {record.size_bytes}"


def _compare(rows: list[tuple[Verdict, FileRecord]]) -> list[list[str]]:
    """Read one file; return the problems of each of its names."""
    verdict, record = rows[0]
    path = verdict.artefact.folder / record.path
    sha256 = hashlib.sha256()
    is_of_the_hub = any(record.sha256 for _, record in rows)
    found = hash_twice(path, sha256) if is_of_the_hub else hash_file(path)
    found_sha256 = sha256.hexdigest()
    return [list(_differences(v.artefact.folder / r.path, r, found, found_sha256)) for v, r in rows]


def _differences(path: Path, record: FileRecord, xxh3_128: str, sha256: str) -> Iterator[str]:
    if xxh3_128 != record.xxh3_128:
        yield f"{path}: content differs from its receipt (xxh3_128 {record.xxh3_128}){_damaged_tensors(path)}"
    elif record.sha256 and sha256 != record.sha256:
        yield f"{path}: content differs from the Hub's SHA-256 {record.sha256}"


def _damaged_tensors(path: Path) -> str:
    """Return the tensors of a distributed checkpoint whose own checksums also fail."""
    if not (path.parent / METADATA_NAME).is_file() or path.name == METADATA_NAME:
        return ""
    try:
        keys = TorchDistReader(path.parent).damaged_keys(path.name)
    except CheckpointError as error:
        return f": {error}"
    return f": {', '.join(keys)}" if keys else ": in no tensor's values"

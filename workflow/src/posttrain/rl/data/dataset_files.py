"""Makes and checks `train.jsonl` and `heldout.jsonl`, generated, from local files or from a Hub repository.

Both files have the same columns (`dataset.py`), whatever the source's format, and share no prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.checkpoint.hub.client import FetchOptions, download
from posttrain.checkpoint.hub.listing import HubSource, list_files
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.staging.file_placement import remove_half_written
from posttrain.config.calibration import MADE, CalibrationPass
from posttrain.config.data import LOCAL_DATA, Data, sources_of
from posttrain.config.evaluation import Suite
from posttrain.config.suites import data_of
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.rl.data.arithmetic import generate_products
from posttrain.rl.data.calibration_rows import make_conversations
from posttrain.rl.data.dataset import write_prompts
from posttrain.rl.data.hub_splits import CARD, files_of_split, matching
from posttrain.rl.data.messages import answer_of, digest_of
from posttrain.rl.data.raw_rows import SUFFIXES, files_of
from posttrain.rl.data.reading import Reading, reading_of
from posttrain.rl.data.reasoning_gym import generate_rows
from posttrain.rl.data.rows import MAX_REPORTED_LINES, ReadRows, Row, describe_bad_rows, read_rows
from posttrain.rl.data.sort_digits import generate_prompts
from posttrain.store import FileRecord, RelativeName, record_files, write_text
from posttrain.types import Prompt

log = logging.getLogger(__name__)
TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"
# Of a calibration pass.
CONVERSATIONS = "conversations.jsonl"
# Folder for the Hub's original files.
SOURCE_FOLDER = "source"


@dataclass(frozen=True)
class Side:
    """The files of one side of a dataset.

    Args:
        name: Their name in the configuration.
        paths: Their paths, in order.
    """

    name: str
    paths: tuple[Path, ...]


def make_dataset(data: Data, folder: Path, manifest: Path, rule: RetryRule | None = None) -> tuple[FileRecord, ...]:
    """Fill `folder` with the dataset that the configuration describes.

    Args:
        data: The configuration's section.
        folder: The partial folder.
        manifest: Where the Hub's list of files is kept (kind hub).
        rule: How often the Hub is asked again.

    Returns:
        One record per file, sorted by path.

    Raises:
        ConfigError: A source is missing or its lines are wrong, there are too few prompts to hold out, or a
            prompt stands in both files.
        RuntimeError: The Hub cannot be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_half_written(folder)
    report = report_of(folder)
    report.unlink(missing_ok=True)
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    fetched: list[FileRecord] = []
    for name, source in sources_of(data).items():
        # Each source has its own folder and file list, because two may have files of the same name.
        lists = manifest.with_name(f"{name}.{manifest.name}") if name else manifest
        sides, records = _rows_of(source, folder, SOURCE_FOLDER + f"/{name}" * bool(name), lists, rule, report)
        train += _prompts(sides[0], name, len(train))
        heldout += _prompts(sides[1], name, len(heldout))
        fetched += records
    _refuse_both(train, heldout)
    for name, prompts in ((TRAIN, train), (HELDOUT, heldout)):
        write_prompts(folder / name, prompts)
    log.info("%s: %d prompts to train on, %d held out", folder, len(train), len(heldout))
    return (*record_files(folder, (TRAIN, HELDOUT)), *fetched)


def make_rows(
    wanted: Suite | CalibrationPass, folder: Path, manifest: Path, rule: RetryRule | None = None
) -> tuple[FileRecord, ...]:
    """Fill `folder` with held-out rows.

    An evaluation suite's rows are prompts, all held out. A calibration pass's rows are conversations, which include the
    answers at their end.

    Args:
        wanted: Configuration of the suite or pass.
        folder: The partial folder.
        manifest: Where the Hub's list of files is kept (kind hub).
        rule: How often the Hub is asked again.

    Returns:
        One record per file, sorted by path.

    Raises:
        ConfigError: A source is missing, has no rows or invalid rows, or fewer than a suite requests.
        RuntimeError: The Hub cannot be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_half_written(folder)
    report_of(folder).unlink(missing_ok=True)
    data, name = data_of(wanted), HELDOUT if isinstance(wanted, Suite) else CONVERSATIONS
    rows: Sequence[Row]
    fetched: tuple[FileRecord, ...] = ()
    if isinstance(wanted, CalibrationPass) and wanted.kind == MADE:
        rows = make_conversations(wanted.made, wanted.num_samples)
    else:
        (side, _), fetched = _sides(data, folder, SOURCE_FOLDER, manifest, rule)
        reading = reading_of(data)
        if isinstance(wanted, CalibrationPass):
            reading = replace(reading, needs_label=False, unlabeled="drop")
        (read,) = _read_sides([side], reading, report_of(folder))
        rows = read.rows
        if isinstance(wanted, Suite):
            rows = _as_many_as_asked(rows, wanted, side)
        elif read.form.is_dialogue:
            rows = [_answered(row) for row in rows]
    write_prompts(folder / name, _prompts(rows, "", 0))
    return (*record_files(folder, (name,)), *fetched)


def _as_many_as_asked(rows: Sequence[Row], suite: Suite, side: Side) -> Sequence[Row]:
    """Return the first rows of a suite."""
    if len(rows) < max(suite.num_prompts, 1):
        allowed, remedy = f"at most {len(rows)}, for the rows of {side.name}", "lower it, or give more rows"
        raise ConfigError(
            [Problem("too-few-rows", "evaluation.suites: num_prompts", str(suite.num_prompts), allowed, remedy)]
        )
    return rows[: suite.num_prompts or None]


def _answered(row: Row) -> Row:
    """Return a dialogue's row with its final answer, which was split off as the label."""
    answer = row.label if isinstance(row.label, list) else [row.answer or answer_of(row.label)]
    return replace(row, messages=(*row.messages, *answer), answer=None)


def _rows_of(
    data: Data, folder: Path, fetched: str, manifest: Path, rule: RetryRule | None, report: Path
) -> tuple[tuple[Sequence[Row], Sequence[Row]], tuple[FileRecord, ...]]:
    """Return the rows of both sides of one source, and a record of each file fetched into `fetched`."""
    if data.kind in ("sort_digits", "arithmetic"):
        counts = data.num_train_prompts, data.num_heldout_prompts, data.seed
        drawn = generate_products(*counts) if data.kind == "arithmetic" else generate_prompts(data.num_digits, *counts)
        train, heldout = ([Row(tuple(row["prompt"]), row["label"]) for row in side] for side in drawn)
        return (train, heldout), ()
    if data.kind == "reasoning_gym":
        return generate_rows(data, reading_of(data)), ()
    sides, records = _sides(data, folder, fetched, manifest, rule)
    return split_rows(data, *sides, report), records


def _sides(
    data: Data, folder: Path, fetched: str, manifest: Path, rule: RetryRule | None
) -> tuple[tuple[Side, Side], tuple[FileRecord, ...]]:
    """Return the files of both sides, and a record of each file fetched into `fetched`."""
    if data.kind in LOCAL_DATA:
        return (_local(data.train_file), _local(data.heldout_file or data.train_file)), ()
    return _fetch(data, folder, fetched, manifest, rule or RetryRule())


def _local(pattern: str) -> Side:
    return Side(pattern, tuple(files_of(pattern)))


# ---- from the Hub ----


def _fetch(
    data: Data, root: Path, name: str, manifest: Path, rule: RetryRule
) -> tuple[tuple[Side, Side], tuple[FileRecord, ...]]:
    """Return both sides, and a record of each file fetched into the folder `name` below the root."""
    folder = root / name
    source = HubSource(data.repo_id, data.revision, "dataset", "data")

    def get(is_wanted: Callable[[str], bool]) -> tuple[FileRecord, ...]:
        return download(source, folder, manifest, is_wanted, FetchOptions(rule=rule))

    if data.train_file and data.heldout_file:
        files = get(lambda path: bool(matching([path], [data.train_file, data.heldout_file])))
        chosen = _sides_of(data, [file.path for file in files], "", source)
    else:
        chosen = _sides_of(data, *_listed(source, folder, manifest, rule, get), source)
        # Fetch the card, too, which names the files when the Hub is not reachable later.
        files = get({CARD, *chosen[0], *chosen[1]}.__contains__)
    names = (data.train_file or data.split, data.heldout_file or data.heldout_split or data.train_file or data.split)
    train, heldout = (
        Side(f"{source}: {name}", tuple(folder / path for path in of)) for name, of in zip(names, chosen, strict=True)
    )
    records = (FileRecord(RelativeName(f"{name}/{f.path}"), f.size_bytes, f.xxh3_128, f.sha256) for f in files)
    return (train, heldout), tuple(records)


def _listed(source: HubSource, folder: Path, manifest: Path, rule: RetryRule, get: Callable) -> tuple[list[str], str]:
    """Return all row files of a repository, and its card."""
    listed = list_files(source, manifest, lambda path: path == CARD or path.endswith(SUFFIXES), rule)
    lying = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    paths = [str(file.path) for file in listed.files] if listed else sorted(lying)
    if CARD not in paths:
        return paths, ""
    get({CARD}.__contains__)
    return paths, (folder / CARD).read_text(errors="replace")


def _sides_of(data: Data, paths: list[str], card: str, source: HubSource) -> tuple[list[str], list[str]]:
    """Return the names of the files of both sides: training and held out.

    Raises:
        ConfigError: A side has no files.
    """

    def chosen(file: str, split: str) -> list[str]:
        return matching(paths, [file]) if file else files_of_split(card, paths, data.subset, split)

    train = chosen(data.train_file, data.split)
    is_own = bool(data.heldout_file or data.heldout_split)
    heldout = chosen(data.heldout_file, data.heldout_split) if is_own else train
    asked = [(train, data.train_file, data.split)] + [(heldout, data.heldout_file, data.heldout_split)] * is_own
    raise_if_any([_none_of(data, file, split, source) for found, file, split in asked if not found])
    return train, heldout


def _none_of(data: Data, file: str, split: str, source: HubSource) -> Problem:
    if file:
        return Problem(
            "no-such-file", "data.train_file, data.heldout_file", repr(file), f"a file of {source}", "check the name"
        )
    value = repr(f"{data.subset}, {split}" if data.subset else split)
    remedy = "see its page, or give data.train_file"
    return Problem("no-such-split", "data.subset, data.split", value, f"a split of {source}", remedy)


# ---- both sides ----


def report_of(folder: Path) -> Path:
    """Return the path of a dataset's report of invalid lines: `maths.partial` -> `maths.wrong_lines.txt`."""
    return folder.with_name(f"{folder.name.removesuffix('.partial')}.wrong_lines.txt")


def split_rows(data: Data, train_side: Side, heldout_side: Side, report: Path) -> tuple[list[Row], list[Row]]:
    """Return the training rows and the held-out rows.

    If both sides use the same files, their last `num_heldout_prompts` rows are held out; if the held-out side has
    separate files, their first `num_heldout_prompts` rows.

    Args:
        data: The configuration's section, or that of one source.
        train_side: Files of training prompts.
        heldout_side: The same or other files.
        report: Output: a list of all invalid lines of both sides, if any.

    Raises:
        ConfigError: See `make_dataset`.
    """
    is_one = train_side.paths == heldout_side.paths
    read = _read_sides([train_side] if is_one else [train_side, heldout_side], reading_of(data), report)
    train, heldout = read[0].rows, read[-1].rows
    count = data.num_heldout_prompts
    if is_one:
        # At least one training row must remain.
        _require_rows(train_side.name, len(train) - 1, data)
        return train[: len(train) - count], train[len(train) - count :]
    _require_rows(heldout_side.name, len(heldout), data)
    return train, heldout[:count]


def _read_sides(sides: Sequence[Side], reading: Reading, report: Path) -> list[ReadRows]:
    """Read each side and check every row."""
    empty = [
        Problem("no-such-file", "data", side.name, "files of rows", "check the pattern")
        for side in sides
        if not side.paths
    ]
    raise_if_any(empty)
    read = [read_rows(side.name, side.paths, reading) for side in sides]
    wrong = [side for side in read if not side.is_right]
    if wrong:
        lines = [f"{side.name}: {row.place}: {row.reason}" for side in wrong for row in side.bad]
        write_text(report, "\n".join([*lines, ""]))
        raise ConfigError([describe_bad_rows(side, report) for side in wrong])
    return read


def _prompts(rows: Sequence[Row], source: str, first: int) -> list[Prompt]:
    return [
        Prompt(number, row.messages, row.label, source, row.columns, row.tools, row.is_text, row.answer)
        for number, row in enumerate(rows, start=first)
    ]


def _refuse_both(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Refuse prompts that are both trained on and held out, of any sources."""
    known = {digest_of(prompt.messages, prompt.tools) for prompt in train}
    both = [prompt for prompt in heldout if digest_of(prompt.messages, prompt.tools) in known]
    if both:
        places = ", ".join(str(prompt.prompt_id + 1) for prompt in both[:MAX_REPORTED_LINES])
        more = f" and {len(both) - MAX_REPORTED_LINES} more" if len(both) > MAX_REPORTED_LINES else ""
        value = f"{len(both)} that are trained on, too: number {places}{more}"
        allowed = "no prompt that is trained on"
        raise ConfigError(
            [Problem("heldout-is-trained-on", "held-out prompts", value, allowed, "take them out of one of the two")]
        )


def _require_rows(name: str, available: int, data: Data) -> None:
    if available < data.num_heldout_prompts:
        allowed = f"at most {available}, for the rows of {name}"
        remedy = "lower it, or give more rows"
        raise ConfigError(
            [Problem("too-few-rows", "data.num_heldout_prompts", str(data.num_heldout_prompts), allowed, remedy)]
        )

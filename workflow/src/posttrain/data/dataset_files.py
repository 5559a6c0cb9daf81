"""Makes `train.jsonl` and `heldout.jsonl`: generated, from local files or from a Hub repository; checked.

Both files have the columns that the configuration names, whatever form the source's prompts had, and no
prompt of one stands in the other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from posttrain.artifacts import FileRecord, RelativeName, record_files, write_text
from posttrain.checkpoint.hub.client import FetchOptions, download
from posttrain.checkpoint.hub.listing import HubSource
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.staging.file_placement import remove_half_written
from posttrain.config.schema import Data
from posttrain.data.dataset import MAX_REPORTED_LINES, check_prompts, describe_bad_lines
from posttrain.data.sort_digits import generate_prompts
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.types import Prompt

log = logging.getLogger(__name__)
TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"
# What a Hub repository gave, as it gave it.
SOURCE_FOLDER = "source"


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
    if data.kind == "sort_digits":
        return _write_generated(data, folder)
    if data.kind == "jsonl":
        return _write_split(data, Path(data.train_file), Path(data.heldout_file), folder)
    fetched = _fetch(data, folder / SOURCE_FOLDER, manifest, rule or RetryRule())
    source = folder / SOURCE_FOLDER
    written = _write_split(data, source / data.train_file, source / data.heldout_file, folder)
    return (*written, *fetched)


def _write_generated(data: Data, folder: Path) -> tuple[FileRecord, ...]:
    rows = generate_prompts(data.num_digits, data.num_train_prompts, data.num_heldout_prompts, data.seed)
    for name, some in zip((TRAIN, HELDOUT), rows, strict=True):
        _write_rows(folder / name, [{data.prompt_key: r["prompt"], data.label_key: r["label"]} for r in some])
    return record_files(folder, (TRAIN, HELDOUT))


def _fetch(data: Data, folder: Path, manifest: Path, rule: RetryRule) -> tuple[FileRecord, ...]:
    source = HubSource(data.repo_id, data.revision, "dataset", "data")
    wanted = {data.train_file, data.heldout_file}
    files = download(source, folder, manifest, wanted.__contains__, FetchOptions(rule=rule))
    absent = wanted - {file.path for file in files}
    raise_if_any(
        [
            Problem("data.train_file, data.heldout_file", repr(name), f"a file of {source}", "check the name")
            for name in sorted(absent)
        ]
    )
    return tuple(
        FileRecord(RelativeName(f"{SOURCE_FOLDER}/{f.path}"), f.size_bytes, f.xxh3_128, f.sha256) for f in files
    )


def _write_split(data: Data, train_file: Path, heldout_file: Path, folder: Path) -> tuple[FileRecord, ...]:
    report = report_of(folder)
    report.unlink(missing_ok=True)
    train, heldout = split_prompts(data, train_file, heldout_file, report)
    for name, prompts in ((TRAIN, train), (HELDOUT, heldout)):
        _write_rows(folder / name, [{data.prompt_key: p.messages, data.label_key: p.label} for p in prompts])
    log.info("%s: %d prompts to train on, %d held out", folder, len(train), len(heldout))
    return record_files(folder, (TRAIN, HELDOUT))


def report_of(folder: Path) -> Path:
    """Return where the wrong lines of a dataset's files are listed: `maths.partial` -> `maths.wrong_lines.txt`."""
    return folder.with_name(f"{folder.name.removesuffix('.partial')}.wrong_lines.txt")


def split_prompts(data: Data, train_file: Path, heldout_file: Path, report: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and those held out.

    One file for both gives its last `num_heldout_prompts` rows to the held-out side; of a file of its own the
    first `num_heldout_prompts` rows are taken.

    Args:
        data: The configuration's section.
        train_file: JSON lines.
        heldout_file: The same file, or another one.
        report: Lists every wrong line of both files, when there are any.

    Raises:
        ConfigError: See `make_dataset`.
    """
    train, heldout = _load_files(data, dict.fromkeys((train_file, heldout_file)), report)
    if train_file == heldout_file:
        # At least one row must be left to train on.
        _require_rows(train_file, len(train) - 1, data)
        return train[: -data.num_heldout_prompts], train[-data.num_heldout_prompts :]
    _require_rows(heldout_file, len(heldout), data)
    heldout = heldout[: data.num_heldout_prompts]
    known = {json.dumps(prompt.messages) for prompt in train}
    both = [prompt for prompt in heldout if json.dumps(prompt.messages) in known]
    raise_if_any([_overlap(both, train_file, heldout_file)] if both else [])
    return train, heldout


def _load_files(data: Data, paths: Iterable[Path], report: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts of the first and of the last file, after checking every line of all."""
    checked = [check_prompts(path, data.prompt_key, data.label_key) for path in paths]
    wrong = [file for file in checked if file.bad or not file.prompts]
    if wrong:
        lines = [f"{file.path}: line {line.number}: {line.reason}" for file in wrong for line in file.bad]
        write_text(report, "\n".join([*lines, ""]))
        raise ConfigError([describe_bad_lines(file, data.prompt_key, data.label_key, report) for file in wrong])
    return checked[0].prompts, checked[-1].prompts


def _require_rows(file: Path, available: int, data: Data) -> None:
    if available < data.num_heldout_prompts:
        allowed = f"at most {available}, for the rows of {file}"
        remedy = "lower it, or give more rows"
        raise ConfigError([Problem("data.num_heldout_prompts", str(data.num_heldout_prompts), allowed, remedy)])


def _overlap(both: Sequence[Prompt], train_file: Path, heldout_file: Path) -> Problem:
    places = ", ".join(str(prompt.prompt_id + 1) for prompt in both[:MAX_REPORTED_LINES])
    more = f" and {len(both) - MAX_REPORTED_LINES} more" if len(both) > MAX_REPORTED_LINES else ""
    value = f"{len(both)} prompts that {train_file} has too: number {places}{more}"
    return Problem(str(heldout_file), value, "no prompt that is trained on", "take them out of one of the two")


def _write_rows(path: Path, rows: Sequence[dict]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

"""Reads rows of any format as prompts with labels, and reports all problems together."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.dataset_formats import FORMS, OWN, Form, NoLabelError, of_completion, recognise
from posttrain.rl.data.keys import AbsentError, Key, kind_of, parse_key
from posttrain.rl.data.messages import (
    ANSWERING_ROLES,
    TEXT_ALONE,
    PromptTemplate,
    RowError,
    answer_of,
    digest_of,
    fuller_answer,
    is_answer,
    messages_of,
    plain,
    templated,
    tools_of,
    with_system_prompt,
)
from posttrain.rl.data.raw_rows import RawRow, first_rows, read_raw
from posttrain.rl.data.reading import Reading

log = logging.getLogger(__name__)
# All of one kind of mistake are told by the first ones; a file may have millions of lines.
MAX_REPORTED_LINES = 50
# Rows used to recognise the format.
NUM_FIRST_ROWS = 100
# Reasons for dropping valid rows, which are counted.
DUPLICATE, UNLABELED = "repeated", "without a label"
# A column of TRL.
TEMPLATE_KWARGS = "chat_template_kwargs"
# Columns that a prompt would be asked with; no model here is shown any.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Row:
    """One row, independent of its format.

    Args:
        messages: The prompt.
        label: The reference for responses, of any JSON type; None if the format has no labels.
        columns: All other columns, in JSON's types.
        tools: JSON schemas of the functions that a response may call, None for none.
        is_text: The prompt is a text, not messages.
        answer: The assistant message whose text is the label, if it has more than text.
    """

    messages: tuple[dict[str, Any], ...]
    label: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    is_text: bool = False
    answer: dict[str, Any] | None = None


@dataclass(frozen=True)
class BadRow:
    """One invalid row of a dataset.

    Args:
        place: "line 3", "row 3", with the file before it where there are several.
        reason: What is wrong with it.
        remedy: An alternative to correcting it.
    """

    place: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class ReadRows:
    """The rows of a dataset.

    Args:
        name: Its file or files, as they were asked for.
        form: The recognised format.
        rows: Valid rows, in order.
        bad: Invalid rows, in order.
        dropped: Number of dropped rows by reason.
    """

    name: str
    form: Form
    rows: list[Row]
    bad: list[BadRow]
    dropped: Mapping[str, int]

    @property
    def is_right(self) -> bool:
        """Whether the dataset has rows, and none of them is wrong."""
        return bool(self.rows) and not self.bad


def read_rows(name: str, paths: Sequence[Path], reading: Reading, most: int | None = None) -> ReadRows:
    """Read files and check every row.

    Args:
        name: What they are called together.
        paths: One file, or parts of one.
        reading: How.
        most: Rows of each file that are read; None for all.

    Raises:
        ConfigError: A file cannot be read, its form is not known, or a setting is wrong.
    """
    form = form_of(first_rows(paths, NUM_FIRST_ROWS), reading, name)
    reader, seen = RowReader(form, reading), dict[int, str]()
    rows: list[Row] = []
    bad: list[BadRow] = []
    dropped: Counter[str] = Counter()
    for path in paths:
        before = f"{path.name}, " if len(paths) > 1 else ""
        for raw in islice(read_raw(path, reader.left_out), most):
            found = reader.read(raw, before)
            if isinstance(found, Row) and reading.duplicates != "keep":
                found = _first_of_its_kind(found, before + raw.place, seen, reading)
            if isinstance(found, Row):
                rows.append(found)
            elif isinstance(found, BadRow):
                bad.append(found)
            else:
                dropped[found] += 1
    if most is None:
        _log_what_was_read(name, form, rows, bad, dropped, reader)
    return ReadRows(name, form, rows, bad, dropped)


def _log_what_was_read(
    name: str, form: Form, rows: Sequence[Row], bad: Sequence[BadRow], dropped: Mapping[str, int], reader: RowReader
) -> None:
    told = "".join(f", {count} {reason} left out" for reason, count in dropped.items())
    log.info("%s: read as %s: %d prompts, %d wrong lines%s", name, form.name, len(rows), len(bad), told)
    if reader.num_replaced:
        log.info("%s: data.system_prompt replaces %d system messages", name, reader.num_replaced)
    for column, count in reader.unreadable.items():
        log.warning("%s: column %r is left out: %s (%d rows)", name, column[0], column[1], count)


def form_of(rows: Sequence[Mapping[str, Any]], reading: Reading, name: str) -> Form:
    """Return where prompt and label lie: by the keys that were given, by columns of the project's own names, by form.

    Args:
        rows: The first ones.
        reading: With the keys.
        name: The file, for the message.

    Raises:
        ConfigError: The form is not known, or has no label where one is needed.
    """
    known = recognise(rows)
    has_prompt, has_label = (
        given or _mostly(rows, own) for given, own in ((reading.prompt_key, OWN.prompt), (reading.label_key, OWN.label))
    )
    needs_label = bool(reading.needs_label or has_label)
    if rows and known is None and not (has_prompt and (has_label or not needs_label)):
        columns = ", ".join(dict.fromkeys(column for row in rows for column in row)) or "none"
        allowed = f"columns of a known form: {', '.join(form.name for form in FORMS)}"
        raise ConfigError([Problem("unknown-columns", name, f"columns {columns}", allowed, _keys_for(rows))])
    own = OWN if needs_label else dataclasses.replace(OWN, label="")
    form = _with_keys(known or own, rows, reading)
    if reading.needs_label and not form.label and not form.is_dialogue:
        remedy = "set data.label_key"
        raise ConfigError(
            [Problem("label-missing", name, f"{form.name}, a form without labels", "a column with the label", remedy)]
        )
    return form


def _keys_for(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which keys to set for rows of no known form."""
    for column in dict.fromkeys(column for row in rows for column in row):
        dialogues = [row[column] for row in rows if isinstance(row.get(column), list) and row[column]]
        if 2 * len(dialogues) > len(rows) and all(map(is_answer, (dialogue[-1] for dialogue in dialogues))):
            return _all_but_the_answer(column)
    return "set data.prompt_key and data.label_key"


def _all_but_the_answer(key: str) -> str:
    return f"set data.prompt_key={key}[:-1] and data.label_key={key}[-1].content"


def _with_keys(form: Form, rows: Sequence[Mapping[str, Any]], reading: Reading) -> Form:
    """Return the form with other keys for prompt and label, where they were given or the project's own are there."""
    prompt = reading.prompt_key or (OWN.prompt if _mostly(rows, OWN.prompt) else form.prompt)
    label = reading.label_key or (OWN.label if _mostly(rows, OWN.label) else form.label)
    if (prompt, label) == (form.prompt, form.label):
        return form
    used = {parse_key(prompt, "data.prompt_key").column, *([parse_key(label).column] if label else [])}
    return dataclasses.replace(
        form,
        name=f"columns {prompt!r} and {label!r}",
        prompt=prompt,
        label=label,
        finish=form.finish if label == form.label else None,
        is_dialogue=form.is_dialogue and prompt == form.prompt,
        left_out=form.left_out - used,
    )


def _mostly(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return bool(rows) and 2 * sum(column in row for row in rows) >= len(rows)


def describe_bad_rows(found: ReadRows, report: Path | None = None, most_told: int = MAX_REPORTED_LINES) -> Problem:
    """Return one problem that lists the bad rows, the first of them in full.

    Args:
        found: What was read.
        report: A file that lists all of them.
        most_told: How many are listed.
    """
    bad, form = found.bad, found.form
    listed = "".join(f"\n        {row.place}: {row.reason}" for row in bad[:most_told])
    num_more = len(bad) - most_told
    more = f"\n        and {num_more} more{f', all of them in {report}' if report else ''}" if num_more > 0 else ""
    dropped = "".join(f", {count} {reason} left out" for reason, count in found.dropped.items())
    num_lines = len(found.rows) + len(bad) + sum(found.dropped.values())
    value = f"{len(bad)} of {num_lines} lines are wrong:{listed}{more}" if bad else f"no prompts{dropped}"
    label = f", {form.label!r}" if form.label else ""
    allowed = f"one JSON object a line: {form.prompt!r} (messages or text){label}, no prompt twice"
    other = sorted({row.remedy for row in bad} - {""})
    general = [] if any("prompt_key" in one for one in other) else ["set data.prompt_key and data.label_key"]
    remedy = ", or ".join(["correct these lines", *other, *general])
    return Problem("rows-invalid", found.name, value, allowed, remedy)


class RowReader:
    """Converts rows of one format."""

    def __init__(self, form: Form, reading: Reading):
        self._form, self._reading = form, reading
        self._prompt = parse_key(form.prompt, "data.prompt_key")
        self._label = parse_key(form.label, "data.label_key") if form.label else None
        self._template = PromptTemplate(reading.prompt_template) if reading.prompt_template else None
        self._response = parse_key(reading.response_key, "data.response_key") if reading.response_key else None
        self.left_out = form.left_out - (self._template.columns if self._template else set())
        self.left_out -= {self._response.column} if self._response else set()
        # The label's column stays, under its own name, for rewards that read it; the project's own is called so anyway.
        self._taken = {"tools", OWN.label, *form.left_out, *([self._prompt.column] if self._prompt.is_column else [])}
        self._taken -= {self._response.column} if self._response else set()
        self.num_replaced = 0
        # Columns that JSON cannot say, with the reason -> rows that have them.
        self.unreadable: Counter[tuple[str, str]] = Counter()

    def read(self, raw: RawRow, before: str) -> Row | BadRow | str:
        """Return the row, its fault, or the reason for dropping it."""
        place = before + raw.place
        if raw.content is None:
            return BadRow(place, raw.reason)
        errors: list[Exception] = []
        messages = self._tried(errors, self._messages, raw.content) or ()
        tools = self._tried(errors, tools_of, raw.content.get("tools"))
        columns = self._tried(errors, self._columns, raw.content) or {}
        self._tried(errors, self._check_response, raw.content)
        prompt, answer = (messages[:-1], messages[-1]) if self._form.is_dialogue and messages else (messages, None)
        self._tried(errors, self._check_prompt, prompt)
        try:
            label, answer = self._labelled(raw.content, answer)
        except NoLabelError as error:
            if self._reading.unlabeled == "drop" and not errors:
                return UNLABELED
            return _bad_row(place, [*errors, RowError(str(error), "set data.unlabeled=drop to leave them out")])
        except RowError as error:
            errors.append(error)
        if errors:
            return _bad_row(place, errors)
        return Row(prompt, label, columns, tools, isinstance(self._prompt.find(raw.content), str), answer)

    def _tried(self, errors: list[Exception], read: Any, value: Any) -> Any:
        try:
            return read(value)
        except (AbsentError, RowError) as error:
            errors.append(error)
            return None

    def _messages(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        messages = messages_of(self._plain(self._prompt, row), self._prompt.text)
        if self._form.is_dialogue and (len(messages) < 2 or messages[-1]["role"] != "assistant"):
            raise RowError(f"{self._prompt.text!r} must end with a prompt and the assistant's message")
        if self._template:
            messages = templated(messages, self._template, row)
        if self._reading.system_prompt:
            self.num_replaced += messages[0]["role"] == "system"
            messages = with_system_prompt(messages, self._reading.system_prompt)
        return messages

    def _check_prompt(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Reject a prompt that ends with an answer, which a model would have to answer again."""
        if not messages or messages[-1]["role"] not in ANSWERING_ROLES or not self._reading.needs_label:
            return
        key = self._prompt.text
        is_cut = self._form.is_dialogue or isinstance(self._prompt.parts[-1], tuple)
        reason = f"{key!r} ends with a message of the {messages[-1]['role']}" + " before the last one" * is_cut
        raise RowError(f"{reason}, which a prompt may not", "" if is_cut else _all_but_the_answer(key))

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if row.get(TEMPLATE_KWARGS):
            raise RowError(f"{TEMPLATE_KWARGS!r} is not read by row", f"remove it, and set data.{TEMPLATE_KWARGS}")
        for name in row.keys() - self._taken:
            if name.lower() in MEDIA and row[name] not in (None, "", []):
                reason = f"{name!r} holds {kind_of(row[name])} that no model would be shown"
                raise RowError(reason, f"remove that column: {TEXT_ALONE}")
            try:
                columns[name] = plain(row[name])
            except RowError as error:
                self.unreadable[name, str(error)] += 1
        return dict(sorted(columns.items()))

    def _plain(self, key: Key, row: Mapping[str, Any]) -> Any:
        try:
            return plain(key.find(row), strict=True)
        except RowError as error:
            raise RowError(f"{key.text!r} {error}") from error

    def _check_response(self, row: Mapping[str, Any]) -> None:
        if self._response:
            value = self._plain(self._response, row)
            try:
                answer_of(value)
            except RowError as error:
                raise RowError(f"{self._response.text!r} {error}") from error

    def _labelled(self, row: Mapping[str, Any], answer: dict[str, Any] | None) -> tuple[Any, dict[str, Any] | None]:
        """Return the label, and the message that it is the text of where that has more.

        Args:
            row: With the label, unless the form has it in the dialogue.
            answer: The last message of a dialogue.
        """
        if self._label is None:
            return (of_completion([answer]), fuller_answer(answer)) if answer else (None, None)
        try:
            given = self._plain(self._label, row)
        except AbsentError as error:
            raise NoLabelError(str(error)) from error
        return self._finished(given), fuller_answer(answer or given)

    def _finished(self, label: Any) -> Any:
        assert self._label is not None
        label = of_completion([label]) if is_answer(label) else label
        try:
            label = self._form.finish(label) if self._form.finish else label
        except NoLabelError as error:
            raise NoLabelError(f"{self._label.text!r} {error}") from error
        if isinstance(label, str) and not label.strip():
            raise NoLabelError(f"{self._label.text!r} is empty")
        return label


def _bad_row(place: str, errors: Sequence[Exception]) -> BadRow:
    remedies = [error.remedy for error in errors if isinstance(error, RowError) and error.remedy]
    return BadRow(place, "; ".join(map(str, errors)), remedies[0] if remedies else "")


def _first_of_its_kind(row: Row, place: str, seen: dict[int, str], reading: Reading) -> Row | BadRow | str:
    earlier = seen.setdefault(digest_of(row.messages, row.tools), place)
    if earlier == place:
        return row
    if reading.duplicates == "drop":
        return DUPLICATE
    return BadRow(place, f"the same prompt as {earlier}", "set data.duplicates=drop or keep")

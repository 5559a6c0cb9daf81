"""The table behind docs/coming-from.md against the schema and the planner's tables: both directions come from it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.flag_cases import flag_cases
from tests.unit.config.test_flags_page import keys_of

from posttrain.config import schema
from posttrain.config.fields import leaf_types
from posttrain.config.request import WORKFLOW_KEYS
from posttrain.plan.flags.megatron_flags import megatron_flags
from posttrain.plan.flags.sglang_flags import engine_flags
from posttrain_import.page import tables, with_tables
from posttrain_import.table import ROWS, TABLES

DOCS = Path(__file__).parents[2] / "docs"
ALL = [row for rows in TABLES.values() for row in rows]


def planned() -> dict[str, set[str]]:
    """Return every setting that the planner has anywhere, with the keys that decide it."""
    found: dict[str, set[str]] = {}
    for resolved in flag_cases().values():
        for flags in (megatron_flags(resolved.config) | engine_flags(resolved.config)).values():
            for item in flags:
                found.setdefault(item.name, set()).update(item.keys)
    return found


def test_a_flag_has_one_row():
    assert len(ROWS) == sum(len(row.names) for row in ALL)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.names[0])
def test_its_keys_exist(row):
    assert set(row.keys) <= {*leaf_types(schema.Config), *WORKFLOW_KEYS}
    assert not (row.late and row.convert is None and not row.keys)
    if row.convert is None and not row.not_here:
        assert len(row.keys) <= len(row.names) or "of miles" in row.note or row.names[0].isupper()


def test_what_it_says_of_the_planner_is_so():
    """A key that a flag is taken over to is among those that decide the planner's setting of the same row."""
    settings = planned()
    # Those of no configuration that is pinned: one has engines on GPUs of a kind, one a model with groups of experts.
    rare = {"moe_router_num_groups", "moe_router_group_topk"}
    for row in ALL:
        for name in row.names:
            setting, key = row.setting_of(name), row.key_of(name)
            assert setting in {*settings, *rare, ""}, name
            if setting in settings and key:
                assert key in settings[setting], name


def test_the_page_is_printed_from_it():
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    assert text.count("<!-- rows: ") == len(tables())
    assert with_tables(text) == text, "python -m posttrain_import.page docs/coming-from.md"


def test_the_page_is_written_anew_in_its_place(tmp_path):
    page, whole = tmp_path / "coming-from.md", (DOCS / "coming-from.md").read_text(encoding="utf-8")
    lines = [line for line in whole.splitlines(keepends=True) if not line.startswith("| `--lr")]
    page.write_text("".join(lines), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != whole
    subprocess.run([sys.executable, "-m", "posttrain_import.page", page], check=True)
    assert page.read_text(encoding="utf-8") == whole


def test_every_key_of_the_tables_for_newcomers_exists():
    known = keys_of(schema.Config) | set(WORKFLOW_KEYS)
    tables_for_newcomers = (DOCS / "coming-from.md").read_text().partition("## Every flag\n")[0]
    rows = [line.split("|") for line in tables_for_newcomers.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 for row in rows)
    keys = {key.removesuffix(".*") for row in rows for key in re.findall("`([^`]+)`", row[2])}
    assert len(keys) > 60
    assert keys <= known
    # In a note, what looks like one of our keys is one.
    sections = {field.name for field in dataclasses.fields(schema.Config)}
    told = {key.partition("=")[0] for row in rows for key in re.findall(r"`([a-z_]+\.[a-z_.]+(?:=\w+)?)`", row[3])}
    theirs = {"rollout.n", "data.sources", "trainer.total_epochs"}
    assert {key for key in told if key.partition(".")[0] in sections} <= known | theirs

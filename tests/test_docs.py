"""Every link of a page leads somewhere: to a file of the project, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.workflow_runs import ROOT

PAGES = sorted(
    path
    for folder in (".", "docs", "docs/decisions", "envs", "findings", "config", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
RECORD = re.compile(r"docs/decisions/(\d{3})")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_records_that_code_names_are_there() -> None:
    kept = {path.name[:3] for path in (ROOT / "docs/decisions").glob("*.md")}
    named = {
        (str(file.relative_to(ROOT)), number)
        for folder in ("workflow", "scripts", "tests", "benchmarks", "config", "envs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".smk", ".yaml", ".sh", ".md"}
        for number in RECORD.findall(file.read_text(encoding="utf-8"))
    }
    assert {number for _, number in named} & kept, "no file names a record: the pattern finds nothing"
    assert {(file, number) for file, number in named if number not in kept} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            dead.append(target)
    assert not dead

"""Every link of a page leads somewhere: to a file of the project, and to a heading of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.workflow_runs import ROOT

PAGES = sorted(
    path
    for folder in (".", "docs", "docs/decisions", "tests", "envs", "findings", "config", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
NAMED = re.compile(r"\bdocs/(?:decisions/(\d{3})|([a-z-]+)\.md)")
# A test or a folder of tests; those of CONTRIBUTING.md that stand for any are left out.
TESTS = re.compile(r"\btests/(?!unit/part/|posttrain_x/)(?:\w+/)*(?:\w+\.py|[a-z]\w*[a-z0-9]\b(?![.<*{]))")
NAMED_TEST, TEST_FUNCTION = re.compile(r"`(test_\w+)`"), re.compile(r"^def (test_\w+)", re.MULTILINE)
# Made when the site is built.
GENERATED = {"rules.md", "rejections.md"}
LINK = re.compile(r"\]\(([^()\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    navigation = list(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(navigation) == len(set(navigation))
    assert set(navigation) - GENERATED == {str(page.relative_to(ROOT)) for page in PAGES}


def pages_in(entry: str | list | dict) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_in(part)


def test_pages_and_records_that_code_names_are_there() -> None:
    there = {path.name[:3] for path in (ROOT / "docs/decisions").glob("*.md")}
    there |= {path.stem for path in (ROOT / "docs").glob("*.md")}
    named = {
        (str(file.relative_to(ROOT)), record or page)
        for folder in ("workflow", "scripts", "tests", "benchmarks", "config", "envs", "findings")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".smk", ".yaml", ".sh", ".md", ".json"}
        for record, page in NAMED.findall(_without_addresses(file.read_text(encoding="utf-8", errors="ignore")))
    }
    assert len({name for _, name in named} & there) > 10, "the pattern finds no pages"
    assert {(file, name) for file, name in named if name not in there} == set()


def _without_addresses(text: str) -> str:
    """Pages of other projects are no pages of ours: https://..., or `(owner/repository, docs/page.md`."""
    return re.sub(r"https?://\S+|\([\w-]+/[\w.-]+, docs/[\w./-]+", "", text)


def test_tests_that_pages_and_code_name_are_there() -> None:
    files = [*PAGES, *(path for folder in ("workflow", "tests") for path in (ROOT / folder).rglob("*.py"))]
    named = {(str(file.relative_to(ROOT)), name) for file in files for name in TESTS.findall(file.read_text())}
    assert len({name for _, name in named}) > 50, "the pattern finds no tests"
    assert {(file, name) for file, name in named if not (ROOT / name).exists()} == set()


def test_test_functions_that_pages_name_are_there() -> None:
    named = {(page.name, name) for page in PAGES for name in NAMED_TEST.findall(page.read_text())}
    files = [*(ROOT / "tests").rglob("test_*.py")]
    there = {path.stem for path in files} | {name for path in files for name in TEST_FUNCTION.findall(path.read_text())}
    assert {(page, name) for page, name in named if name not in there} == set()


def test_every_promise_names_its_test() -> None:
    """The table of docs/asynchronous.md: what is promised of a mode has a test, unless the cell says that it is not."""
    table = (ROOT / "docs/asynchronous.md").read_text().partition("## What a run promises")[2].partition("\n|---")[2]
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in table.partition("\n\n")[0].splitlines()[1:]]
    cells = [cell for row in rows for cell in row if cell != "-" and not cell.startswith("no:")]
    assert len(cells) > 15, "the table is not found"
    assert [cell for cell in cells if not NAMED_TEST.search(cell)] == []


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

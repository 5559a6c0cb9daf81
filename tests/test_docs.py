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
LINK = re.compile(r"\]\(([^()\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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

"""What is to run first on a machine with GPUs can be collected where there is none, and its page names it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.workflow_runs import ROOT

MARK = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)


def test_all_of_them_are_collected_by_what_the_makefile_runs() -> None:
    asked = subprocess.run(["make", "--dry-run", "test-gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    commands = [line.split() for line in asked.stdout.splitlines() if line.startswith("pytest ")]
    (first,), folders = ([word for word in words if word.startswith("tests/")] for words in commands)
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if MARK.search(path.read_text())]
    assert all(str(path.relative_to(ROOT)).startswith((first, *folders)) for path in others)
    marked = sorted({str(path.relative_to(ROOT)) for path in [*(ROOT / first).glob("test_*.py"), *others]})
    command = [sys.executable, "-m", "pytest", *marked, "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert sorted(collected) == marked
    assert len([line for line in done.stdout.splitlines() if line.startswith("tests/gpu/")]) >= 20


def test_the_page_names_every_file_in_order() -> None:
    page = (ROOT / "docs" / "first-gpu.md").read_text()
    named = re.findall(r"^\| `(test_\d_\w+\.py)`", page, re.MULTILINE)
    assert named == sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))

"""Results of a benchmark in the README: written by the command that measured them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import claims

PROGRAM = """
from benchmarks import claims
from pathlib import Path
claims.README = Path({readme!r})
claims.start(lambda: (claims.report("ratio", 1.26, 1.5), claims.report_table(("size", "s"), [(1, 2.5)])), lambda: None)
"""


def run(folder: Path, *words: str) -> str:
    """Run a benchmark named speed in a process of its own; return the README."""
    program, readme = folder / "speed.py", folder / "README.md"
    program.write_text(PROGRAM.format(readme=str(readme)))
    environment = {**os.environ, "PYTHONPATH": str(claims.README.parent.parent)}
    subprocess.run([sys.executable, program, *words], env=environment, check=True, capture_output=True)
    return readme.read_text()


@pytest.fixture
def folder(tmp_path):
    for words in (("init", "-q"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("# Measured\n\nBefore.\n")
    return tmp_path


def test_a_block_is_appended_then_replaced(folder):
    once = run(folder, "--write")
    assert "| ratio | 1.26 | ≤ 1.5 | yes |" in once
    assert "| size | s |\n|---|---|\n| 1 | 2.5 |" in once
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=folder, capture_output=True, text=True)
    assert "`python -m benchmarks.speed`, 2" in once
    assert f"commit {commit.stdout.strip()}" in once
    readme = folder / "README.md"
    readme.write_text(once.replace("1.26", "9") + "\nAfter.\n")
    assert run(folder, "--write") == once + "\nAfter.\n"


@pytest.mark.parametrize("words", [(), ("--quick", "--write")])
def test_nothing_is_written_without_the_switch_or_from_quick_sizes(folder, words):
    assert run(folder, *words) == "# Measured\n\nBefore.\n"


def test_a_missed_goal_is_marked(capsys):
    claims.report("ratio", 1.6, 1.5)
    assert '"met": false' in capsys.readouterr().out
    assert claims._claims[-1][-1] == "**no**"

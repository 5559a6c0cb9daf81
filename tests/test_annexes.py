"""Annexes are packages beside `posttrain`: the demo, dry runs and the core's tests do without any of them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.workflow_runs import FAST, ROOT
from tests.test_import_order import ANNEXES, imports_of

from posttrain.__main__ import ANNEXES as COMMANDS

KEPT = ("benchmarks", "config", "docs", "envs", "findings", "profiles", "scripts", "tests", "workflow")
# Python finds the library of an editable installation, too, unless it is told otherwise.
ALONE = f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT / 'workflow' / 'src')!r}]\n"


class Copy:
    """A copy of the project without an annex."""

    def __init__(self, folder: Path, annex: str):
        self._folder, self._alone = folder / "project", folder / "alone"
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", annex)
        self._folder.mkdir()
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, self._folder)
            elif path.name in KEPT:
                shutil.copytree(path, self._folder / path.name, symlinks=True, ignore=ignored)
        self._alone.mkdir()
        (self._alone / "sitecustomize.py").write_text(ALONE)

    def run(self, *words: str, timeout: float = 300) -> str:
        """Run a module of Python in the copy and return what it prints."""
        found = [str(self._alone), str(self._folder / "workflow" / "src")]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(params=ANNEXES)
def annex(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def copy(annex: str, tmp_path: Path) -> Copy:
    return Copy(tmp_path, annex)


def test_tests_of_the_core_import_no_annex() -> None:
    found = []
    for path in (ROOT / "tests" / "unit").rglob("*.py"):
        left, seen = [path], set[Path]()
        while left:
            seen.add(file := left.pop())
            names = set(imports_of(ast.parse(file.read_text())))
            found += [f"{path.name}: {name}" for name in names if name.partition(".")[0] in ANNEXES]
            support = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.support.")}
            left += [other for other in support - seen if other.exists()]
    assert not found


def test_without_an_annex_its_commands_are_gone_and_all_else_is_there(copy: Copy, annex: str) -> None:
    commands = copy.run("posttrain", "--help")
    for command, module in COMMANDS.items():
        assert (f"    {command} " in commands) == (not module.startswith(annex))
    copy.run("posttrain", "plan", "model=tiny", "site=local")
    assert "train" in copy.run("snakemake", "-n", "--config", "model=tiny", "site=local")


@pytest.mark.faults("slow")
@pytest.mark.timeout(3600)
def test_without_an_annex_the_cores_tests_pass(copy: Copy) -> None:
    core = ("tests/unit", "tests/test_unpickling.py", "tests/test_import_order.py")
    copy.run("pytest", *core, "-q", "-m", "not faults", "-p", "no:cacheprovider", timeout=3000)


@pytest.mark.faults("slow")
def test_without_an_annex_the_demo_runs(copy: Copy) -> None:
    settings = " ".join(f"{key}={value}" for key, value in FAST.items())
    copy.run("snakemake", "--cores", "2", "--config", "model=tiny", "site=local", f"set={settings}", timeout=600)

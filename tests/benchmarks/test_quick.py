"""Every benchmark runs: its quick form, all in one process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import benchmarks
import pytest
from benchmarks.claims import MissingEnvironment

FOLDER = Path(next(iter(benchmarks.__path__)))
# What others import, or run as a process of their own.
HELPERS = {"claims", "measuring", "scripted_engine", "trainer_loops", "trainer_sides", "update_simulation"}
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - HELPERS)


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_form_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}").quick()
    except MissingEnvironment as missing:
        pytest.skip(str(missing))
    for line in capsys.readouterr().out.splitlines():
        if line.startswith('{"claim"'):
            assert isinstance(json.loads(line)["value"], int | float)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_command_line_offers(name: str) -> None:
    assert "    start(main, quick)\n" in (FOLDER / f"{name}.py").read_text()

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.conftest import made_once
from tests.support.precisions import ask, make_checkpoints


@pytest.fixture(scope="session")
def told_by_engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A random checkpoint and the same in NVFP4 with what engines said of both, and the words of the step."""

    def make(folder: Path) -> None:
        words = make_checkpoints(folder)
        for precision, name in (("original", "hf"), ("nvfp4", "nvfp4")):
            ended = ask(folder, words, precision, folder / name)
            assert ended.returncode == 0, ended.stderr
            assert f"{precision}: " in ended.stdout
        (folder / "words.json").write_text(json.dumps([*map(str, words)]))

    folder = made_once(tmp_path_factory, "precisions", make)
    return folder, json.loads((folder / "words.json").read_text())


@pytest.fixture(scope="module")
def asked(
    told_by_engines: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[object]]:
    """The same for one file of tests alone, which may change it."""
    folder, words = told_by_engines
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("asked") / "precisions")), [*words]

"""What is resolved once and read by every job, and runs that an older version began."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.fields import leaves_of
from posttrain.config.legacy_runs import kept_from_before
from posttrain.config.load import dump_yaml
from posttrain.plan.resolve import resolve
from posttrain.store.resolved_file import read_resolved, write_resolved

CONFIG_DIR = Path(__file__).parents[3] / "config"
OLDER = "algorithm.zero_advantages=update"


def resolved(words: str = "", **names):
    return resolve({"model": "tiny", "site": "local", "set": words, **names}, CONFIG_DIR)


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_a_job_reads_what_was_resolved(tmp_path: Path, model: str) -> None:
    given = resolved("site.end_command=[echo,done] optimizer.lr=1e-6", model=model, run="mine", fork="old@2")
    path = write_resolved(given, tmp_path / "configs")
    assert read_resolved(path) == given
    assert write_resolved(given, tmp_path / "configs") == path
    other = write_resolved(resolved("optimizer.lr=2e-6", model=model), tmp_path / "configs")
    assert sorted(tmp_path.glob("configs/*")) == sorted([path, other])


def test_a_file_of_another_version_is_not_understood(tmp_path: Path) -> None:
    path = write_resolved(resolved(), tmp_path)
    content = json.loads(path.read_text())
    del content["config"]["algorithm"]["clip"]
    other = json.dumps(content).encode()
    path = path.with_name(f"{hashlib.sha256(other).hexdigest()[:16]}.json")
    path.write_bytes(other)
    with rejected("resolved-config-invalid", path, "'algorithm.clip'"):
        read_resolved(path)


@pytest.mark.parametrize("spoil", ["changed", "cut off", "nested", "gone"])
def test_what_is_not_what_was_written_is_neither_read_nor_kept(tmp_path: Path, spoil: str) -> None:
    path = write_resolved(resolved("optimizer.lr=1e-6"), tmp_path)
    content = path.read_bytes()
    spoilt = {"changed": content.replace(b"1e-06", b"1e-03"), "cut off": content[:-9], "nested": b"[" * 100_000}
    path.unlink() if spoil == "gone" else path.write_bytes(spoilt[spoil])
    with rejected("resolved-config-invalid", path):
        read_resolved(path)
    assert write_resolved(resolved("optimizer.lr=1e-6"), tmp_path) == path
    assert path.read_bytes() == content


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def test_a_run_of_the_older_default_goes_on_under_its_own_name(results: Path) -> None:
    older = resolved(OLDER)
    assert resolved().config.algorithm.zero_advantages == "skip"
    (results / older.run).mkdir(parents=True)
    assert (resolved().run, resolved().config) == (older.run, older.config)
    assert resolved().origins["algorithm.zero_advantages"] == "the run, which an older version began"
    assert kept_from_before(resolved()) == OLDER
    assert kept_from_before(older) == "", "who names it knows"
    # Who says what he wants gets it, and any other experiment is not that run.
    assert resolved("algorithm.zero_advantages=skip").run != older.run
    assert resolved("optimizer.lr=1e-3").config.algorithm.zero_advantages == "skip"


def test_a_run_with_a_name_of_its_own_goes_on_as_its_file_says(results: Path) -> None:
    (results / "mine").mkdir(parents=True)
    file = results / "mine" / "experiment.yaml"
    file.write_text(dump_yaml(resolved(OLDER, run="mine").experiment))
    assert "zero_advantages" not in file.read_text()
    assert resolved(run="mine").config.algorithm.zero_advantages == "update"
    file.write_text(dump_yaml(resolved("algorithm.zero_advantages=skip", run="mine").experiment))
    assert resolved(run="mine").config.algorithm.zero_advantages == "skip"
    assert leaves_of(resolved(run="mine").experiment)["algorithm.zero_advantages"] == "skip"

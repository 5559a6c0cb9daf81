"""What another run has trained as a source: found by name, held by the digest of its receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.store import Paths, Receipt, receipt_of, record_files, write_receipt

CONFIG = Path(__file__).parents[3] / "config"


def export(results: Path, name: str, content: str = "weights") -> str:
    folder = results / name / "hf"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(content)
    receipt = Receipt("finalize_export_hf", record_files(folder, ["model.safetensors"]), {}, {})
    write_receipt(receipt_of(folder), receipt)
    return receipt.digest


def resolved(results: Path, source: str = "cold", more: str = "", **names: str):
    words = f"site.results={results} model.source.kind=run model.source.run={source} {more}"
    return resolve({"model": "tiny_qwen3", "site": "local", "set": words, **names}, CONFIG)


def problem_of(*arguments, **names):
    with pytest.raises(ConfigError) as caught:
        resolved(*arguments, **names)
    (problem,) = caught.value.problems
    return problem


def test_the_digest_of_the_export_is_the_revision(tmp_path: Path) -> None:
    digest, found = export(tmp_path, "cold"), resolved(tmp_path)
    assert found.config.model.source.revision == digest
    assert found.origins["model.source.revision"] == str(tmp_path / "cold/hf.receipt.json")
    assert found.experiment["model"]["source"]["run"] == "cold"
    paths = Paths(found)
    assert paths.source_folder == tmp_path / "cold/hf"
    assert paths.revision12 == f"run{digest[:9]}"
    assert paths.model_root.name.startswith(paths.revision12)


def test_another_export_under_the_name_is_another_source_and_another_run(tmp_path: Path) -> None:
    export(tmp_path, "cold")
    before = resolved(tmp_path)
    assert resolved(tmp_path).run == before.run
    export(tmp_path, "cold", "others")
    after = resolved(tmp_path)
    assert after.run != before.run
    assert Paths(after).model_root != Paths(before).model_root
    pinned = f"model.source.revision={before.config.model.source.revision}"
    assert problem_of(tmp_path, "cold", pinned).key == "model.source.revision"
    assert resolved(tmp_path, run="mine").run == "mine"


def test_a_run_without_an_export_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    export(tmp_path, "cold"), (tmp_path / "begun").mkdir()
    problem = problem_of(tmp_path, "begun")
    assert (problem.key, problem.allowed) == ("model.source.run", "cold")
    assert "finalize_export_hf" in problem.remedy
    assert problem_of(tmp_path, "colt").remedy == "did you mean 'cold'?"
    assert problem_of(tmp_path, "cold", run="cold").allowed == "another run than this one"
    assert problem_of(tmp_path, "../cold").key == "model.source.run"
    assert problem_of(tmp_path, "cold", "model.source.revision=1").key == "model.source.revision"


def test_a_digest_that_is_given_stands_for_a_run_that_is_gone(tmp_path: Path) -> None:
    digest = "a" * 64
    assert resolved(tmp_path, "cold", f"model.source.revision={digest}").config.model.source.revision == digest


def test_runs_of_other_sources_do_not_know_the_key(tmp_path: Path) -> None:
    found = resolve({"model": "tiny_qwen3", "site": "local"}, CONFIG)
    assert "run" not in found.experiment["model"]["source"]

import dataclasses
import json

import pytest
from tests.support.forked_programs import run_step
from tests.support.synthetic_run import make_run

from posttrain.checkpoint.verification import verify
from posttrain.store import read_receipt, receipt_of, record_files, write_receipt


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path, num_steps=8)


def render(inputs, folder):
    words = [
        "--config",
        inputs.config,
        "--run-folder",
        inputs.run_folder,
        "--before",
        inputs.before,
        "--after",
        inputs.after,
        "--export-receipt",
        inputs.export_receipt,
        "--logs",
        inputs.logs,
        "--summary",
        folder / "summary.json",
        "--report",
        folder / "report.html",
    ]
    return run_step("render_report", words)


def test_summary_and_report_are_written_and_shown(made):
    folder = made.paths.run
    done = render(made.inputs, folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_steps"] == 8
    lines = done.stdout.splitlines()
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert lines[-3] == summary["verdict"]["headline"] == "The model got better"
    assert "26.4 % → 93.1 % on 512 held-out prompts" in lines[-2]
    assert summary["final_weights_sha256"] in lines[-4]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_what_a_reader_sees_has_a_receipt(made):
    def problems():
        return [problem for verdict in verify(made.paths) for problem in verdict.problems]

    for _ in range(2):  # a second report takes no notice of the first
        assert render(made.inputs, made.paths.run).returncode == 0
        assert problems() == []
    assert "run: report.html" not in made.paths.report.read_text()
    for path in (made.paths.report, made.paths.summary, made.paths.config):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"0.9", b"0.8", 1) if b"0.9" in content else content[:-1] + b" ")
        assert [problem for problem in problems() if problem.startswith(f"{path}: content differs")]
        path.write_bytes(content)
    size = made.paths.summary.stat().st_size
    made.paths.summary.unlink()
    assert problems() == [f"{made.paths.summary}: missing, expected {size} bytes"]


def test_another_evaluation_than_the_one_reported_is_told(made):
    assert render(made.inputs, made.paths.run).returncode == 0
    path = made.paths.evaluation("after")
    path.write_text(path.read_text().replace("0.931", "0.951"))
    receipt = read_receipt(receipt_of(path))
    write_receipt(receipt_of(path), dataclasses.replace(receipt, files=record_files(path.parent, [path.name])))
    (problem,) = [problem for verdict in verify(made.paths) for problem in verdict.problems]
    assert problem.startswith(f"{receipt_of(made.paths.report)}: made from evaluation after ")


def test_an_unfinished_run_is_refused_in_one_message(made, tmp_path):
    (made.paths.train / "done.json").unlink()
    done = render(made.inputs, tmp_path)
    assert done.returncode == 1
    assert "done.json: no such receipt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "summary.json").exists()

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.synthetic_run import make_run

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path, num_steps=8)


def render(inputs, folder):
    command = [
        sys.executable,
        REPOSITORY / "scripts/render_report.py",
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
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_summary_and_report_are_written_and_shown(made, tmp_path):
    done = render(made.inputs, tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_steps"] == 8
    lines = done.stdout.splitlines()
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert lines[-3] == summary["verdict"]["headline"] == "The model got better"
    assert "26.4 % → 93.1 % on 512 held-out prompts" in lines[-2]
    assert summary["final_weights_sha256"] in lines[-4]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_an_unfinished_run_is_refused_in_one_message(made, tmp_path):
    (made.paths.train / "done.json").unlink()
    done = render(made.inputs, tmp_path)
    assert done.returncode == 1
    assert "done.json: no such receipt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "summary.json").exists()

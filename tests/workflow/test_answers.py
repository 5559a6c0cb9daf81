"""Every rule that answers a question answers it each time: asked, something changed underneath, asked again.

A rule without outputs is an answer: Snakemake then runs it whenever it is named. Each has a case here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.begun_runs import begin_run
from tests.support.rejections import assert_rejected
from tests.support.synthetic_run import make_run
from tests.support.workflow_runs import WorkflowFolder, run_snakemake
from tests.workflow.test_rules import RULES, WITHOUT_WORK

from posttrain.store import Receipt, read_receipt, receipt_of, record_files, write_receipt

pytestmark = pytest.mark.slow

ANSWERS = {name for name, text in RULES.items() if not re.search(r"^\s*output:$", text, re.MULTILINE)} - WITHOUT_WORK


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def asked_twice(workflow: WorkflowFolder, target: str, change: Callable[[], object], code: int = 0) -> tuple[str, str]:
    """Return what a target said before and after a change; the second time it ends with `code`."""
    before = workflow.run(target)
    change()
    found, after = workflow.attempt(target)
    assert found == code, after
    return before, after


def test_every_answer_has_a_case() -> None:
    cases = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert ANSWERS - cases == set()
    assert {"plan", "verify", "verify_store", "check", "status", "gc", "attach", "preflight", "rehearse"} <= ANSWERS


def test_plan(tmp_path: Path) -> None:
    def ask(*config: str) -> dict:
        told = run_snakemake(tmp_path, "plan", "--cores", "1", "--config", "model=glm5", *config)
        assert told.returncode == 0, told.stdout
        (page,) = re.findall(r"^plan: (.*\.html)$", told.stdout, re.MULTILINE)
        assert "743,911,199,232" in told.stdout, "the table is printed, too"
        return {"page": Path(page).name, **json.loads(Path(page).with_suffix(".json").read_text())}

    first, other = ask("nodes=24"), ask("nodes=16")
    assert (first["page"], other["page"]) == ("glm5-24xh200.html", "glm5-16xh200.html")
    assert sorted(path.name for path in (tmp_path / "results" / "plans").iterdir()) == [
        *("glm5-16xh200.html", "glm5-16xh200.json", "glm5-24xh200.html", "glm5-24xh200.json")
    ]
    assert (first["parallelism"]["nodes"], other["parallelism"]["nodes"]) == (24, 16)
    again = ask("nodes=16", "set=training.num_steps=7")
    assert again["flags"]["training.num_steps"]["value"] == 7
    assert other["flags"]["training.num_steps"]["value"] == 3000


def test_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_REHEARSAL_ENV", str(tmp_path / "nowhere"))
    without_gpus, without_environment = (
        run_snakemake(tmp_path, "rehearse", "--cores", "1", "--config", f"model={model}") for model in ("tiny", "glm5")
    )
    assert_rejected(without_gpus.stdout, "nothing-to-rehearse", key="hardware")
    assert_rejected(without_environment.stdout, "environment-missing", "make env-rehearsal")
    assert without_gpus.returncode == without_environment.returncode == 1
    assert not (tmp_path / "results" / "plans").exists()


def test_verify(finished: WorkflowFolder) -> None:
    shard = sorted((finished.run_folder / "hf").glob("*.safetensors"))[0]
    verified = finished.run_folder / "verified.json"
    _, after = asked_twice(finished, "verify", lambda: (verified.stat(), flip_a_byte(shard)), code=1)
    assert shard.name in after
    assert not verified.exists(), "what was proven once does not hold any more"


def test_verify_store(finished: WorkflowFolder) -> None:
    shard = sorted(finished.store.glob("tiny/*/torch_dist-*/*.distcp"))[0]
    assert shard.name in asked_twice(finished, "verify_store", lambda: flip_a_byte(shard), code=1)[1]


def test_verify_rollout_weights(finished: WorkflowFolder) -> None:
    (fp8,) = finished.store.glob("tiny/*/rollout_fp8-????????")
    report = fp8.with_name(f"{fp8.name}.report.json")
    told: list[str] = []

    def change() -> None:
        told.append(report.read_text())
        flip_a_byte(sorted(fp8.glob("*.safetensors"))[0])

    asked_twice(finished, "verify_rollout_weights", change)
    assert json.loads(report.read_text()) != json.loads(told[0])


def test_check_data(finished: WorkflowFolder) -> None:
    # Other tests have asked the store that they share for other datasets.
    digest = read_receipt(receipt_of(finished.run_folder / "data_check.json")).inputs["dataset"]
    folders = (prompts.parent for prompts in finished.store.glob("datasets/*/train.jsonl"))
    (prompts,) = (folder / "train.jsonl" for folder in folders if read_receipt(receipt_of(folder)).digest == digest)

    def change() -> None:
        first, *others = prompts.read_text().splitlines(keepends=True)
        prompts.write_text("".join([json.dumps({**json.loads(first), "label": "another"}) + "\n", *others]))

    before, after = asked_twice(finished, "check_data", change)
    assert "label: another" not in before
    assert "label: another" in after


# An engine starts, and its speed is measured at several loads.
def test_benchmark_serving(finished: WorkflowFolder) -> None:
    shard = sorted((finished.run_folder / "hf").glob("*.safetensors"))[0]
    assert shard.name in asked_twice(finished, "benchmark_serving", lambda: flip_a_byte(shard), code=1)[1]


@pytest.mark.faults("answers")
def test_compare_precisions(finished: WorkflowFolder) -> None:
    def change() -> None:
        told = json.loads((finished.run_folder / "evaluation" / "precisions.json").read_text())
        assert [row["precision"] for row in told["precisions"]] == ["original", "fp8"]
        assert told["precisions"][1]["divergence"]["num_tokens"] > 0
        flip_a_byte(shard)

    shard = sorted((finished.run_folder / "hf").glob("*.safetensors"))[0]
    before, after = asked_twice(finished, "compare_precisions", change, code=1)
    assert re.search("^deploy (original|fp8): ", before, re.MULTILINE)
    assert shard.name in after


def test_check(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    workflow = WorkflowFolder(tmp_path, tmp_path / "store", {"engine.port": port})
    with socket.create_server(("127.0.0.1", port), backlog=1) as server:
        server.close()
        assert "problem" not in workflow.run("check")
    with socket.create_server(("127.0.0.1", port)):
        code, after = workflow.attempt("check")
    assert code == 1
    assert f"engine.port = {port}" in after


def test_preflight(tmp_path: Path) -> None:
    workflow = WorkflowFolder(tmp_path, tmp_path / "store", {}, {})
    disk = tmp_path / "node_local"

    def lose_the_disk() -> None:
        shutil.rmtree(disk, ignore_errors=True)
        disk.touch()  # where the folder of copies should be

    def found() -> dict[str, object]:
        (path,) = workflow.results.glob("*/preflight.json")
        return json.loads(path.read_text())

    assert "ok       node0" in workflow.run("preflight")
    assert (found()["fit"], found()["unfit"]) == (["node0"], {})
    lose_the_disk()
    code, after = workflow.attempt("preflight")
    assert code == 1
    assert "node0: node-local disk (site.node_local): " in after
    assert found()["fit"] == []
    assert sorted(path.name for path in workflow.results.glob("*/preflight/*")) == ["001", "002"]


def test_status(tmp_path: Path) -> None:
    paths = begin_run(tmp_path / "results", "old")
    first = run_snakemake(tmp_path, "status", "--cores", "1").stdout
    with open(paths.metrics, "a") as metrics:
        metrics.write(json.dumps({"step": 7, "rollout/reward_mean": 0.9}) + "\n")
    second = run_snakemake(tmp_path, "status", "--cores", "1").stdout
    assert ("6 of 40" in first, "7 of 40" in second) == (True, True)


def test_attach(tmp_path: Path) -> None:
    paths = begin_run(tmp_path / "results", "old")
    first = run_snakemake(tmp_path, "attach", "--cores", "1", "--config", "run=old").stdout
    with open(paths.metrics, "a") as metrics:
        metrics.write(json.dumps({"step": 7, "rollout/reward_mean": 0.9}) + "\n")
    second = run_snakemake(tmp_path, "attach", "--cores", "1", "--config", "run=old").stdout
    assert ("6 of 40" in first, "7 of 40" in second) == (True, True)


def test_gc(tmp_path: Path) -> None:
    first = run_snakemake(tmp_path, "gc", "--cores", "1").stdout
    folder = tmp_path / "resources" / "datasets" / "jsonl-1"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(bytes(1000))
    write_receipt(receipt_of(folder), Receipt("download_dataset", record_files(folder), {}, {}))
    then = time.time() - 30 * 86_400
    for path in (tmp_path / "resources").rglob("*"):
        os.utime(path, (then, then))
    second = run_snakemake(tmp_path, "gc", "--cores", "1").stdout
    assert ("0 can be freed" in first, "1 can be freed" in second) == (True, True)


def test_replay(tmp_path: Path) -> None:
    """What it makes is held against a run in end_to_end/test_resume.py; here it misses rollouts, and says which."""
    paths = begin_run(tmp_path / "results", "old")
    first = run_snakemake(tmp_path, "replay", "--cores", "1", "--config", "run=old")
    rows = paths.metrics.read_text().splitlines(keepends=True)
    paths.metrics.write_text("".join(rows[:4]))
    second = run_snakemake(tmp_path, "replay", "--cores", "1", "--config", "run=old")
    assert_rejected(first.stdout, "rollout-incomplete", "step_000004: 0 of 16")
    assert_rejected(second.stdout, "rollout-incomplete", "step_000002: 0 of 16")
    assert (first.returncode, second.returncode) == (1, 1)


def test_snapshot(tmp_path: Path) -> None:
    made = make_run(tmp_path, num_steps=12)
    made.paths.train_done.unlink()
    made.paths.evaluation("after").unlink()
    rows = made.paths.metrics.read_text().splitlines(keepends=True)
    made.paths.metrics.write_text("".join(rows[:7]))
    (made.paths.run / "report.html").write_text("an earlier report")
    # Whoever asks knows the run by its name, and need not say what it learns.
    choice = [f"run={made.paths.run.name}", "model=tiny", f"set=site.results={made.paths.run.parent}"]
    for step in (7, 8):
        done = run_snakemake(tmp_path, "snapshot", "--cores", "1", "--config", *choice)
        assert done.returncode == 0, done.stdout
        assert f"so far {step} of 12 steps; not there yet: the end of training, the evaluation after" in done.stdout
        assert f"snapshot: {made.paths.snapshot}" in done.stdout
        page = made.paths.snapshot.read_text()
        assert f"<b>So far</b>: {step} steps of 12, as of " in page
        assert "Not there yet: the end of training, the evaluation after training." in page
        assert "optimizer.lr" in page, "the run's own configuration"
        with open(made.paths.metrics, "a") as metrics:
            metrics.write(rows[step])
    assert (made.paths.run / "report.html").read_text() == "an earlier report", "it is Snakemake's"

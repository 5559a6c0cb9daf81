import json

import pytest
from tests.support.forked_programs import run_posttrain
from tests.support.rejections import assert_rejected
from tests.support.resolved_words import resolved_words
from tests.support.synthetic_run import make_run


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path, num_steps=3)


def verify(made, *more):
    chosen = resolved_words(made.workflow, made.paths.run.parent.parent)
    return run_posttrain("verify", *chosen, *more)


def test_an_untouched_run_is_proven(made):
    done = verify(made)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "41 files are what their receipts say"
    verified = json.loads((made.paths.run / "verified.json").read_text())
    digests = {row["name"]: row["digest"] for row in verified["artefacts"]}
    exported = next(row for row in verified["artefacts"] if row["name"] == "run: hf")
    assert exported["inputs"] == {"hf_patched": digests["hf_patched"], "train": digests["train"]}
    assert verified["num_files"] == 41


def test_what_no_receipt_names_is_told_at_the_end(made):
    logs = made.paths.train / "attempts/001"
    logs.mkdir(parents=True)
    for name in ("engine0.log", "rank0.log"):
        (logs / name).write_text("started")
    done = verify(made)
    line = next(line for line in done.stdout.splitlines() if line.startswith("not looked at"))
    expected = "config.resolved.yaml (1 file), evaluation (2 files), hf.history.jsonl (1 file), "
    expected += "records.history.jsonl (1 file), train (1 file), train/attempts (2 files), "
    expected += "train/wandb (1 file)"
    assert line == f"not looked at, because no receipt names them: {expected}"
    assert "train/attempts/001/rank0.log" in json.loads((made.paths.run / "verified.json").read_text())["not_covered"]


def test_every_bad_file_is_named(made):
    bad = [made.paths.hf / "model.bin", made.paths.torch_dist / "__0_0.bin"]
    for path in bad:
        path.write_bytes(path.read_bytes()[::-1])
    done = verify(made)
    assert done.returncode == 1
    assert not (made.paths.run / "verified.json").exists()
    assert all(f"{path}: content differs" in done.stderr for path in bad)
    assert done.stdout.count("1 problem") == 2
    assert "Traceback" not in done.stderr
    assert verify(made, "--sizes-only").returncode == 0


def test_a_run_without_receipts_is_not_proven(made):
    for path in made.paths.run.parent.parent.rglob("*.receipt.json"):
        path.unlink()
    made.paths.train_done.unlink()
    for path in (*made.paths.run.glob("evaluation/*.json"), *made.paths.run.glob("node_local/*.json")):
        path.unlink()
    done = verify(made)
    assert done.returncode == 1
    assert_rejected(done.stderr, "receipt-mismatch", "(8)")
    assert done.stderr.count("missing: nothing proves what it stands for") == 8

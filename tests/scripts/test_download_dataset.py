import dataclasses
import json
import random
import subprocess
from pathlib import Path

import pytest
from tests.support.forked_programs import run_step
from tests.support.hub_server import HubServer
from tests.support.killing import run_killed
from tests.support.rejections import assert_rejected
from tests.support.resolved_words import words_with

from posttrain.config.schema import Data
from posttrain.rl.data.dataset import load_prompts
from posttrain.store import read_receipt, receipt_of, require_files

DATA = Data(
    kind="sort_digits",
    num_train_prompts=50,
    num_heldout_prompts=9,
    num_digits=4,
    seed=7,
    reward="exact_match",
)


def _arguments(data: Data, folder: Path) -> list[object]:
    return [
        *words_with(data=dataclasses.asdict(data)),
        "--folder",
        folder,
        "--receipt",
        receipt_of(folder),
    ]


def _run(arguments) -> subprocess.CompletedProcess:
    return run_step("download_dataset", arguments)


def test_the_tasks_own_dataset(tmp_path):
    done = _run(_arguments(DATA, tmp_path / "sort_digits"))
    assert done.returncode == 0, done.stderr
    receipt = require_files(tmp_path / "sort_digits", receipt_of(tmp_path / "sort_digits"), content=True)
    assert [record.path for record in receipt.files] == ["heldout.jsonl", "train.jsonl"]
    assert len(load_prompts(tmp_path / "sort_digits" / "train.jsonl")) == 50


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "repo").mkdir()
    rows = [{"prompt": f"{i}+1", "label": str(i + 1)} for i in range(30)]
    (tmp_path / "repo" / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "repo"


def test_a_download_survives_kills_and_ends_with_the_same_bytes(tmp_path, repo):
    with HubServer() as hub:
        data = dataclasses.replace(
            DATA,
            kind="hub",
            repo_id="owner/sums",
            revision=hub.add_repo("owner/sums", repo, "dataset"),
            train_file="all.jsonl",
            heldout_file="all.jsonl",
        )
        points = random.Random(4).sample(range(1, 40), 8)
        arguments, env = _arguments(data, tmp_path / "store" / "sums"), {"HF_ENDPOINT": hub.url}
        endings = run_killed("download_dataset", arguments, tmp_path / "store", [*points, 10**9], env)
        assert endings.count(-9) >= 4
        assert endings[-1] == 0
        undisturbed = _arguments(data, tmp_path / "other" / "sums")
        assert run_killed("download_dataset", undisturbed, tmp_path / "other", [10**9], env) == [0]
    receipts = [receipt_of(tmp_path / store / "sums") for store in ("store", "other")]
    assert read_receipt(receipts[0]).digest == read_receipt(receipts[1]).digest
    require_files(tmp_path / "store" / "sums", receipts[0], content=True)


def test_bad_lines_are_one_message(tmp_path, repo):
    with open(repo / "all.jsonl", "a") as file:
        file.write('{"prompt": "0+1", "label": "1"}\n{"prompt": "what?"}\n')
    local = str(repo / "all.jsonl")
    data = dataclasses.replace(DATA, kind="jsonl", train_file=local, heldout_file=local)
    done = _run(_arguments(data, tmp_path / "jsonl"))
    assert done.returncode == 1
    assert_rejected(done.stderr, "rows-invalid", "2 of 32")
    assert "line 31: the same prompt as line 1" in done.stderr
    assert "line 32: 'label' is missing" in done.stderr
    assert "Traceback" not in done.stderr

"""GSM8K as it is downloaded, whole: every label is right for its own question and for no other of another label."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from tests.support.workflow_runs import ROOT

from posttrain.data.dataset_files import reading_of
from posttrain.data.rows import read_rows
from posttrain.planner.resolve import resolve
from posttrain.reward.answer import Answer
from posttrain.reward.graders import GraderPool
from posttrain.reward.scoring import Scorer

# Beside the checkout, where it is at all (MIT licence); CI has it.
FILES = [ROOT.parent / "shared" / "data" / f"gsm8k_{split}.jsonl" for split in ("train", "test")]
NUM_ROWS = {"train": 7473, "test": 1319}

pytestmark = pytest.mark.skipif(not all(file.exists() for file in FILES), reason="no copy of GSM8K beside the checkout")


@pytest.mark.parametrize("file", FILES, ids=NUM_ROWS)
def test_every_label(file: Path) -> None:
    config = resolve({"model": "tiny", "site": "local", "set": "data.reward=math_answer"}, ROOT / "config").config
    rows = read_rows(file.name, [file], reading_of(config.data)).rows
    published = [json.loads(line)["answer"].rpartition("#### ")[2].replace(",", "") for line in file.open()]
    assert len(rows) == NUM_ROWS[file.stem.removeprefix("gsm8k_")]
    assert [row.label for row in rows] == published
    others = list(published)
    random.Random(1).shuffle(others)
    asked = [Answer(f"So it is {row.columns['answer']}", row.label, row.messages) for row in rows]
    asked += [Answer(f"#### {other}", row.label, row.messages) for row, other in zip(rows, others, strict=True)]
    with GraderPool.of(config) as pool:
        rewards = [one.reward for (one,) in asyncio.run(Scorer(config, pool).score([[answer] for answer in asked]))]
    assert rewards[: len(rows)] == [1.0] * len(rows)
    same = [float(float(row.label) == float(other)) for row, other in zip(rows, others, strict=True)]
    assert rewards[len(rows) :] == same

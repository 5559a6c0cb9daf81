"""GSM8K as it is downloaded, whole: every label is right for its own question and for no other of another label."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

import pytest
from tests.support.workflow_runs import ROOT

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.data.dataset_files import reading_of
from posttrain.rl.data.rows import Row, read_rows
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scorer

# Beside the checkout, where it is at all (MIT licence); CI has it.
FILES = [ROOT.parent / "shared" / "data" / f"gsm8k_{split}.jsonl" for split in ("train", "test")]
NUM_ROWS = {"train": 7473, "test": 1319}

pytestmark = pytest.mark.skipif(not all(file.exists() for file in FILES), reason="no copy of GSM8K beside the checkout")


# What verl's examples/data_preprocess/gsm8k.py asks, see forms/README.md.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def read(file: Path, **settings: str) -> tuple[Config, list[Row]]:
    workflow = {"model": "tiny", "site": "local", "set": "data.reward=math_answer", "data": settings}
    config = resolve(workflow, ROOT / "config").config
    return config, read_rows(file.name, [file], reading_of(config.data)).rows


@pytest.mark.parametrize("file", FILES, ids=NUM_ROWS)
def test_every_row_is_what_verl_makes_of_it(file: Path) -> None:
    _, rows = read(file, prompt_template=f"{{prompt}} {INSTRUCTION}")
    published = [json.loads(line) for line in file.open()]
    assert len(rows) == NUM_ROWS[file.stem.removeprefix("gsm8k_")]
    assert [row.messages[0]["content"] for row in rows] == [f"{row['question']} {INSTRUCTION}" for row in published]
    stated = [re.search(r"#### (-?[0-9.,]+)", row["answer"]) for row in published]
    assert [row.label for row in rows] == [found[1].replace(",", "") for found in stated if found]


@pytest.mark.parametrize("file", FILES, ids=NUM_ROWS)
def test_every_label(file: Path) -> None:
    config, rows = read(file)
    others = [row.label for row in rows]
    random.Random(1).shuffle(others)
    asked = [Answer(f"So it is {row.columns['answer']}", row.label, row.messages) for row in rows]
    asked += [Answer(f"#### {other}", row.label, row.messages) for row, other in zip(rows, others, strict=True)]
    with GraderPool.of(config) as pool:
        rewards = [one.reward for (one,) in asyncio.run(Scorer(config, pool).score([[answer] for answer in asked]))]
    assert rewards[: len(rows)] == [1.0] * len(rows)
    same = [float(float(row.label) == float(other)) for row, other in zip(rows, others, strict=True)]
    assert rewards[len(rows) :] == same

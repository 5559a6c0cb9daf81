"""The rows of a local file after the file has changed, and after it has not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.workflow_runs import FAST, WorkflowFolder

pytestmark = [pytest.mark.slow, pytest.mark.faults("answers")]


def write_rows(path: Path, answer: str) -> None:
    """Write rows with a time long ago, as an archive that is unpacked has it."""
    rows = [{"prompt": f"{number}+1", "label": answer} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (1e9, 1e9))


def test_an_older_file_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    rows, older = tmp_path / "rows.jsonl", tmp_path / "older.jsonl"
    data = {"data.kind": "jsonl", "data.train_file": rows, "data.heldout_file": tmp_path / "heldout.jsonl"}
    data |= {"data.num_train_prompts": 16}
    write_rows(rows, "1")
    write_rows(older, "22")
    write_rows(tmp_path / "heldout.jsonl", "3")
    (tmp_path / "heldout.jsonl").write_text((tmp_path / "heldout.jsonl").read_text().replace("+1", "+2"))
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", FAST | data)

    def labels() -> set[str]:
        (made,) = workflow.store.glob("datasets/*/train.jsonl")
        return {json.loads(line)["label"] for line in made.read_text().splitlines()}

    workflow.run("download_dataset")
    assert labels() == {"1"}
    assert "Nothing to be done" in workflow.run("download_dataset")
    older.rename(rows)
    workflow.run("download_dataset")
    assert labels() == {"22"}
    assert "Nothing to be done" in workflow.run("download_dataset")

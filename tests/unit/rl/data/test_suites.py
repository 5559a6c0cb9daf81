"""The suites of the repository read the rows that their datasets have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.load import merge
from posttrain.config.suites import eval_tasks_of
from posttrain.rl.data.reading import reading_of
from posttrain.rl.data.rows import read_rows

CONFIG_DIR = Path(__file__).parents[4] / "config"
# The columns of cais/mmlu and openai/openai_humaneval.
ROWS: dict[str, dict[str, Any]] = {
    "mmlu": {"question": "2+2?", "subject": "mathematics", "choices": ["1", "4", "3", "2"], "answer": 1},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def add(a, b):\n    """Add {both}."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_a_suite_reads_its_rows(name: str, tmp_path: Path) -> None:
    config = merge({"model": "tiny", "site": "local", "suites": name}, CONFIG_DIR).config
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n")
    read = read_rows("rows", [path], reading_of(eval_tasks_of(config)[name].data))
    assert read.bad == []
    (row,) = read.rows
    text = row.messages[-1]["content"]
    if name == "mmlu":
        assert text.startswith("2+2?\n\nA. 1\nB. 4\nC. 3\nD. 2\n")
        assert row.label == 1
    else:
        assert text.endswith(f"```python\n{ROWS[name]['prompt']}```")
        assert (row.label, row.columns["entry_point"]) == (ROWS[name]["test"], "add")

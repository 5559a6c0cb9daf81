from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.killing import run_killed
from tests.support.resolved_words import resolved_words

from posttrain.artifacts import read_receipt, receipt_of, require_files
from posttrain.data.dataset import load_prompts

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DIALOGUE = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 2."},
]


def get(wanted: dict[str, Any], folder: Path, points: list[int]) -> list[int]:
    workflow = {"model": "tiny", "site": "local", "serving": {"passes": {"mine": wanted}}}
    words = resolved_words(workflow, folder.parent / "resolved")
    asked = [*words, "--name", "mine", "--folder", folder, "--receipt", receipt_of(folder)]
    return run_killed("download_pass", asked, folder.parent, points, {})


@pytest.mark.parametrize("column", ["messages", "conversation"])
def test_whole_conversations_of_this_machine_with_their_tools(tmp_path: Path, column: str) -> None:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "pass"
    file.write_text("".join(json.dumps({column: DIALOGUE, "tools": [TOOL], "n": i}) + "\n" for i in range(3)))
    key = {} if column == "messages" else {"prompt_key": column, "system_prompt": "add"}
    assert get({"file": str(file), **key}, folder, [10**9]) == [0]
    require_files(folder, receipt_of(folder), content=True)
    prompts = load_prompts(folder / "conversations.jsonl")
    assert len(prompts) == 3
    system = [{"role": "system", "content": "add"}] if key else []
    assert [dict(message) for message in prompts[0].messages] == [*system, *DIALOGUE]
    assert prompts[0].tools == [TOOL]


def test_our_own_survive_kills_and_end_with_the_same_bytes(tmp_path: Path) -> None:
    wanted, digests = {"kind": "made", "made": "coding", "num_samples": 5}, []
    for name, points in (("killed", [3, 5]), ("calm", [])):
        folder = tmp_path / name / "pass"
        folder.parent.mkdir()
        endings = get(wanted, folder, [*points, 10**9])
        assert endings == [*[-9] * len(points), 0]
        digests.append(read_receipt(receipt_of(folder)).digest)
        assert len(load_prompts(folder / "conversations.jsonl")) == 5
    assert digests[0] == digests[1]


@pytest.mark.parametrize("content", ["", '{"messages": 3}\n'])
def test_a_source_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert get({"file": str(tmp_path / "rows.jsonl")}, tmp_path / "pass", [10**9]) == [1]
    assert not receipt_of(tmp_path / "pass").exists()

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.hub_server import HubServer
from tests.support.killing import run_killed
from tests.support.resolved_words import resolved_words

from posttrain.rl.data.dataset import load_prompts
from posttrain.store import read_receipt, receipt_of, require_files

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DIALOGUE = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 2."},
]


def arguments(suite: dict[str, Any], folder: Path) -> list[object]:
    workflow = {"model": "tiny", "site": "local", "evaluation": {"suites": {"sums": suite}}}
    words = resolved_words(workflow, folder.parent / "resolved")
    return [*words, "--kind", "suite", "--name", "sums", "--folder", folder, "--receipt", receipt_of(folder)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    file = tmp_path / "repo" / "test.jsonl"
    # What stands in a suite twice is asked twice.
    sums = [*range(30), 3]
    file.write_text("".join(json.dumps({"question": f"{i}+1", "label": str(i + 1)}) + "\n" for i in sums))
    return file


def test_rows_of_this_machine(tmp_path: Path, rows: Path) -> None:
    suite = {"kind": "files", "file": str(rows), "prompt_key": "question", "system_prompt": "add"}
    for count, folder in ((0, tmp_path / "all"), (7, tmp_path / "some")):
        asked = arguments({**suite, "num_prompts": count}, folder)
        assert run_killed("download_rows", asked, tmp_path, [10**9], {}) == [0]
        require_files(folder, receipt_of(folder), content=True)
        prompts = load_prompts(folder / "heldout.jsonl")
        assert len(prompts) == (count or 31)
        assert [message["content"] for message in prompts[1].messages] == ["add", "1+1"]
        assert prompts[1].label == "2"


def test_more_prompts_than_there_are_rows(tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture) -> None:
    asked = arguments({"kind": "files", "file": str(rows), "prompt_key": "question", "num_prompts": 32}, tmp_path / "a")
    assert run_killed("download_rows", asked, tmp_path, [10**9], {}) == [1]
    assert not receipt_of(tmp_path / "a").exists()


def test_a_download_survives_kills_and_ends_with_the_same_bytes(tmp_path: Path, rows: Path) -> None:
    with HubServer() as hub:
        revision = hub.add_repo("owner/sums", rows.parent, "dataset")
        suite = {"repo_id": "owner/sums", "revision": revision, "split": "test", "prompt_key": "question"}
        points, env = random.Random(4).sample(range(1, 40), 4), {"HF_ENDPOINT": hub.url}
        killed, undisturbed = tmp_path / "store" / "sums", tmp_path / "other" / "sums"
        endings = run_killed("download_rows", arguments(suite, killed), killed.parent, [*points, 10**9], env)
        assert endings.count(-9) >= 2
        assert endings[-1] == 0
        assert run_killed("download_rows", arguments(suite, undisturbed), undisturbed.parent, [10**9], env) == [0]
    assert read_receipt(receipt_of(killed)).digest == read_receipt(receipt_of(undisturbed)).digest
    require_files(killed, receipt_of(killed), content=True)


def get(wanted: dict[str, Any], folder: Path, points: list[int]) -> list[int]:
    workflow = {"model": "tiny", "site": "local", "serving": {"passes": {"mine": wanted}}}
    words = resolved_words(workflow, folder.parent / "resolved")
    asked = [*words, "--kind", "pass", "--name", "mine", "--folder", folder, "--receipt", receipt_of(folder)]
    return run_killed("download_rows", asked, folder.parent, points, {})


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

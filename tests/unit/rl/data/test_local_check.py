"""What every row of a file would be rejected for is known when the run is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.plan.resolve import resolve
from posttrain.rl.data import local_check
from posttrain.rl.data.local_check import NUM_ROWS, check_data_files

CONFIG = Path(__file__).parents[4] / "config"
GOOD = [{"prompt": f"a{i}", "label": "1"} for i in range(3)]


def _lines(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def check(file: Path | str, *words: str, must_exist: bool = True, kind: str = "files") -> list:
    named = f"data.kind={kind} data.train_file={file} data.num_heldout_prompts=1"
    config = resolve({"model": "tiny", "site": "local", "set": " ".join([named, *words])}, CONFIG).config
    return check_data_files(config, must_exist)


def test_right_files_have_no_problems(tmp_path: Path) -> None:
    assert check(_lines(tmp_path / "a.jsonl", GOOD)) == []
    (tmp_path / "a.csv").write_text("question,label\n1+1,2\n")
    assert check(tmp_path / "a.csv", "data.prompt_key=question") == []


@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        (GOOD, ["data.prompt_key=questoin"], "'questoin' is missing"),
        (GOOD, ["data.prompt_key=prompt[x]"], "data.prompt_key = 'prompt[x]'"),
        (GOOD, ["data.label_key=label["], "data.label_key = 'label['"),
        (GOOD, ["data.prompt_template=Solve."], "data.prompt_template = 'Solve.'"),
        (GOOD, ["data.prompt_template=Q:{level}/{prompt}"], "'level' is missing"),
        ([{"text": "a"}], [], "columns text"),
        (["a;b", "1;2"], [], "not JSON"),
        (
            [{"prompt": [{"role": "assistant", "content": "a"}], "label": "a"}],
            [],
            "ends with a message of the assistant",
        ),
    ],
)
def test_keys_columns_and_formats_are_refused(tmp_path: Path, rows: list, words: list[str], told: str) -> None:
    problems = check(_lines(tmp_path / "a.jsonl", rows), *words)
    assert len(problems) == 1
    assert told in str(problems[0])


def test_a_table_of_the_wrong_form_is_told_in_a_few_lines(tmp_path: Path) -> None:
    (problem,) = check(_lines(tmp_path / "a.jsonl", ["no json"] * 200))
    assert problem.value.startswith(f"{NUM_ROWS} of {NUM_ROWS} lines are wrong")
    assert len(problem.value.splitlines()) == 5
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04" + bytes(50))
    assert "zip archive" in check(tmp_path / "a.xlsx")[0].value


def test_it_is_a_look_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated prompts and single wrong rows are for the step that reads everything."""
    rows = [*GOOD, "no json", GOOD[0], *({"prompt": f"b{i}", "label": "1"} for i in range(NUM_ROWS)), "no json"]
    assert check(_lines(tmp_path / "a.jsonl", rows)) == []
    big = tmp_path / "a.json"
    big.write_text("[no json")
    assert len(check(big)) == 1
    monkeypatch.setattr(local_check, "MAX_ARRAY_BYTES", 4)
    assert check(big) == []


def test_rows_without_labels_may_be_left_out_as_the_configuration_says(tmp_path: Path) -> None:
    path = _lines(tmp_path / "a.jsonl", [{"prompt": "a", "label": ""}])
    assert len(check(path)) == 1
    assert check(path, "data.unlabeled=drop") == []


def test_files_that_are_not_here(tmp_path: Path) -> None:
    for file in (tmp_path / "none.jsonl", tmp_path / "none-*.jsonl", tmp_path):
        assert "data: data files" in str(check(file)[0])
        assert check(file, must_exist=False) == []


def test_suites_and_sources_are_looked_at(tmp_path: Path) -> None:
    good, bad = _lines(tmp_path / "a.jsonl", GOOD), _lines(tmp_path / "b.jsonl", [{"text": "a"}])
    suite = f"evaluation.suites.s.kind=files evaluation.suites.s.file={bad} evaluation.suites.s.reward=exact_match"
    (problem,) = check(good, suite)
    assert problem.key == str(bad)
    (problem,) = check(good, "data.sources.one.prompt_key=a[", "data.sources.two.weight=2")
    assert problem.key == "data.sources.one.prompt_key"
    assert check("a.parquet", "data.repo_id=a/b", f"data.revision={'a' * 40}", "data.label_key=a[", kind="hub") != []

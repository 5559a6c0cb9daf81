import json
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet
from tests.support.hub_server import HubServer
from tests.support.rejections import rejected

from posttrain.checkpoint.hub.listing import HubSource
from posttrain.config.data import DataSource
from posttrain.config.schema import Data
from posttrain.rl.data import dataset_files
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import make_dataset
from posttrain.rl.data.raw_rows import local_files
from posttrain.store import record_files

DATA = Data(
    kind="sort_digits",
    num_train_prompts=20,
    num_heldout_prompts=5,
    num_digits=3,
    seed=7,
    reward="exact_match",
)


@pytest.fixture
def make(tmp_path):
    return lambda data: make_dataset(data, tmp_path / "data.partial", tmp_path / "data.manifest.json")


@pytest.fixture
def read(tmp_path):
    return lambda name: [json.loads(line) for line in (tmp_path / "data.partial" / name).read_text().splitlines()]


def _write(path, questions):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": q, "answer": q.upper()}) + "\n" for q in questions))
    return str(path)


def _local(tmp_path, train, heldout, **more):
    files = {
        "train_file": _write(tmp_path / "a.jsonl", train),
        "heldout_file": _write(tmp_path / "b.jsonl", heldout),
    }
    more = {"num_heldout_prompts": 2, "seed": 1, "reward": "math_answer"} | more
    return Data(kind=more.pop("kind", "files"), prompt_key="question", label_key="answer", **files, **more)


def test_generated_prompts_are_the_generators(make, read, tmp_path):
    records = make(DATA)
    assert records == record_files(tmp_path / "data.partial")
    train, heldout = dataset_files.generate_prompts(3, 20, 5, 7)
    assert (read("train.jsonl"), read("heldout.jsonl")) == (train, heldout)
    assert len(load_prompts(tmp_path / "data.partial" / "train.jsonl")) == 20


@pytest.mark.parametrize("keys", [{}, {"prompt_key": "question", "label_key": "answer"}])
def test_columns_are_always_the_same(make, read, keys):
    make(replace(DATA, **keys))
    assert set(read("train.jsonl")[0]) == {"prompt", "label"}


def test_two_local_files_give_messages(make, read, tmp_path):
    make(_local(tmp_path, ["a", "b", "c"], ["x", "y", "z"]))
    assert read("train.jsonl") == [
        {
            "prompt": [{"role": "user", "content": text}],
            "label": text.upper(),
            "columns": {"answer": text.upper()},
            "is_text": True,
        }
        for text in "abc"
    ]
    assert [row["label"] for row in read("heldout.jsonl")] == ["X", "Y"]


def test_one_file_gives_its_last_rows_to_the_held_out_side(make, read, tmp_path):
    data = _local(tmp_path, list("abcde"), ["x"])
    make(replace(data, heldout_file=""))
    assert [row["label"] for row in read("train.jsonl")] == ["A", "B", "C"]
    assert [row["label"] for row in read("heldout.jsonl")] == ["D", "E"]


@pytest.mark.parametrize(("heldout", "same"), [(["x"], False), ([], True)])
def test_too_few_rows_to_hold_out(make, tmp_path, heldout, same):
    data = _local(tmp_path, ["a", "b"], heldout or ["x"])
    with rejected("too-few-rows", "at most 1", key="data.num_heldout_prompts"):
        make(replace(data, heldout_file=data.train_file) if same else data)


def test_a_prompt_in_both_files(make, tmp_path):
    with rejected("heldout-is-trained-on", "number 2"):
        make(_local(tmp_path, ["a", "b"], ["c", "a"]))


def test_bad_lines_of_a_local_file(make, tmp_path):
    with rejected("rows-invalid", "line 2", "line 1"):
        make(_local(tmp_path, ["a", "a"], ["c", "d"]))


def test_one_report_lists_every_wrong_line_of_both_files(make, tmp_path):
    data = _local(tmp_path, ["a", "b"], ["c", "d"])
    (tmp_path / "a.jsonl").write_text("no json\n" * 60)
    with open(data.heldout_file, "a") as file:
        file.write('{"question": "e"}\n')
    report = tmp_path / "data.wrong_lines.txt"
    with rejected("rows-invalid", "10 more", report) as raised:
        make(data)
    assert [problem.key for problem in raised.value.problems] == [data.train_file, data.heldout_file]
    lines = report.read_text().splitlines()
    assert len(lines) == 61
    assert lines[59].startswith(f"{data.train_file}: line 60: not JSON")
    assert lines[60] == f"{data.heldout_file}: line 3: 'answer' is missing"
    make(_local(tmp_path, ["a", "b"], ["c", "d"]))
    assert not report.exists()


@pytest.mark.parametrize("kind", ["files", "jsonl"])
def test_patterns_and_folders_of_parquet(make, read, tmp_path, kind):
    rows = [{"question": text, "answer": f"so #### {place}"} for place, text in enumerate("abcdef")]
    (tmp_path / "test").mkdir()
    for name, some in {"train-1": rows[2:4], "train-0": rows[:2], "test/a": rows[4:]}.items():
        parquet.write_table(pyarrow.Table.from_pylist(some), tmp_path / f"{name}.parquet")
    files = {"train_file": str(tmp_path / "train-*.parquet"), "heldout_file": str(tmp_path / "test")}
    data = Data(kind=kind, num_heldout_prompts=1, seed=1, reward="math_answer", **files)
    make(data)
    assert [row["label"] for row in read("train.jsonl")] == ["0", "1", "2", "3"]
    assert [row["label"] for row in read("heldout.jsonl")] == ["4"]
    names = [path.name for path in local_files(data)]
    assert names == ["train-0.parquet", "train-1.parquet", "a.parquet"]
    assert local_files(DATA) == []
    with rejected("no-such-file", "check the pattern"):
        make(replace(data, train_file=str(tmp_path / "none-*")))


def test_a_prompt_kept_twice_is_on_one_side_only(make, tmp_path):
    data = _local(tmp_path, ["a", "b", "c", "d", "a"], ["x"], duplicates="keep")
    with rejected("heldout-is-trained-on", "number 2"):
        make(replace(data, heldout_file=""))


def test_settings_reach_the_rows(make, read, tmp_path):
    more = {"duplicates": "drop", "system_prompt": "Be short.", "prompt_template": "<{prompt}>"}
    make(_local(tmp_path, ["a", "a", "b"], ["x", "y"], **more))
    assert [[message["content"] for message in row["prompt"]] for row in read("train.jsonl")] == [
        ["Be short.", "<a>"],
        ["Be short.", "<b>"],
    ]
    blank = tmp_path / "a.jsonl"
    blank.write_text('{"question": "a", "answer": ""}\n{"question": "b", "answer": "1"}\n')
    files = {"train_file": str(blank), "heldout_file": str(tmp_path / "b.jsonl")}
    keys = {"prompt_key": "question", "label_key": "answer", "num_heldout_prompts": 2, "seed": 1}
    make(Data(kind="files", reward="math_answer", unlabeled="drop", **keys, **files))
    assert [row["label"] for row in read("train.jsonl")] == ["1"]


# ---- the Hub ----


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as server:
        monkeypatch.setattr(dataset_files, "HubSource", lambda *fields: HubSource(*fields, endpoint=server.url))
        yield server


def _of_hub(hub, folder, **more):
    revision = hub.add_repo("owner/maths", folder, repo_type="dataset")
    fields = {"prompt_key": "question", "label_key": "answer", "num_heldout_prompts": 2, "seed": 1}
    return Data(kind="hub", repo_id="owner/maths", revision=revision, reward="math_answer", **fields | more)


def test_a_repository_gives_the_files_named(make, read, hub, tmp_path):
    _write(tmp_path / "repo" / "data" / "all.jsonl", list("abcde"))
    _write(tmp_path / "repo" / "other.jsonl", list("fg"))
    data = _of_hub(hub, tmp_path / "repo", train_file="data/all.jsonl", heldout_file="data/all.jsonl")
    records = make(data)
    assert [row["label"] for row in read("heldout.jsonl")] == ["D", "E"]
    assert hub.fetched == {"data/all.jsonl": 1}
    assert sorted(record.path for record in records) == [
        "heldout.jsonl",
        "source/data/all.jsonl",
        "train.jsonl",
    ]
    assert make(data) == records
    assert hub.fetched == {"data/all.jsonl": 1}


def test_a_file_that_the_repository_does_not_have(make, hub, tmp_path):
    _write(tmp_path / "repo" / "train.jsonl", list("abcde"))
    data = _of_hub(hub, tmp_path / "repo", train_file="train.jsonl", heldout_file="test.jsonl")
    with rejected("no-such-file", "'test.jsonl'", key="data.train_file, data.heldout_file"):
        make(data)


def test_a_revision_that_does_not_exist(make, hub, tmp_path):
    _write(tmp_path / "repo" / "train.jsonl", list("abcde"))
    data = _of_hub(hub, tmp_path / "repo", train_file="train.jsonl", heldout_file="train.jsonl")
    with rejected("no-such-revision", "0000", key="data.revision"):
        make(replace(data, revision="0" * 40))


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def _split_repo(folder, card):
    for name, texts in {
        "main/train-0": "ab",
        "main/train-1": "cd",
        "main/test-0": "ef",
        "socratic/train-0": "gh",
    }.items():
        _write(folder / f"{name}.jsonl", texts)
    if card:
        (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize("card", [CARD, "", "# no word about files"])
@pytest.mark.parametrize("offline", [False, True])
def test_a_split_of_a_subset(make, read, hub, tmp_path, monkeypatch, card, offline):
    data = _of_hub(hub, _split_repo(tmp_path / "repo", card), subset="main", split="train", heldout_split="test")
    records = make(data)
    if offline:
        monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
        assert make(data) == records
    assert [row["label"] for row in read("train.jsonl")] == ["A", "B", "C", "D"]
    assert [row["label"] for row in read("heldout.jsonl")] == ["E", "F"]
    names = {f"source/main/{name}.jsonl" for name in ("train-0", "train-1", "test-0")}
    assert {record.path for record in records} == {"train.jsonl", "heldout.jsonl", *names} | (
        {"source/README.md"} if card else set()
    )
    assert max(hub.fetched.values()) == 1


def test_a_split_alone_gives_its_last_rows_and_patterns_are_fetched_too(make, read, hub, tmp_path):
    data = _of_hub(hub, _split_repo(tmp_path / "repo", CARD), split="train")
    for files in ({}, {"split": "", "train_file": "main/train-*", "heldout_file": "main/train-*"}):
        make(replace(data, **files))
        assert [row["label"] for row in read("train.jsonl")] == ["A", "B"]
        assert [row["label"] for row in read("heldout.jsonl")] == ["C", "D"]


def test_a_split_that_the_repository_does_not_have(make, hub, tmp_path):
    data = _of_hub(hub, _split_repo(tmp_path / "repo", CARD), subset="main", split="validation")
    with rejected("no-such-split", "'main, validation'", key="data.subset, data.split"):
        make(data)


def test_several_sources_make_one_dataset(make, read, tmp_path):
    files = {
        "train_file": _write(tmp_path / "c.jsonl", ["d", "e"]),
        "heldout_file": _write(tmp_path / "d.jsonl", ["v"]),
    }
    sources = {
        "numbers": DataSource(kind="sort_digits"),
        "letters": DataSource(num_heldout_prompts=1, prompt_key="question", label_key="answer", **files),
    }
    data = replace(DATA, kind="files", sources=sources)
    make(data)
    train, heldout = (load_prompts(tmp_path / "data.partial" / f"{side}.jsonl") for side in ("train", "heldout"))
    assert [prompt.source for prompt in train] == ["numbers"] * 20 + ["letters"] * 2
    assert [prompt.label for prompt in train[20:]] == ["D", "E"]
    assert [prompt.source for prompt in heldout] == ["numbers"] * 5 + ["letters"]
    assert [prompt.prompt_id for prompt in train] == list(range(22))
    assert [path.name for path in local_files(data)] == ["c.jsonl", "d.jsonl"]


def test_a_prompt_that_one_source_trains_on_and_another_holds_out_is_refused(make, tmp_path):
    one, other = (_local(tmp_path / name, *rows) for name, rows in (("x", ("ab", "cd")), ("y", ("ef", "ga"))))
    keys = ("train_file", "heldout_file", "prompt_key", "label_key")
    sources = {
        name: DataSource(**{key: getattr(data, key) for key in keys}) for name, data in (("one", one), ("other", other))
    }
    with rejected("heldout-is-trained-on", "number 4"):
        make(replace(one, sources=sources))

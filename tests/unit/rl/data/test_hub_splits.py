import pytest

from posttrain.rl.data.hub_splits import files_of_split, matching

PATHS = ["README.md", "main/train-0.parquet", "main/train-1.parquet", "main/test-0.parquet", "socratic/train-0.parquet"]
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  default: true
  data_files: socratic/*.parquet
---
# GSM8K
"""


@pytest.mark.parametrize(
    ("subset", "split", "files"),
    [
        ("main", "train", ["main/train-0.parquet", "main/train-1.parquet"]),
        ("main", "test", ["main/test-0.parquet"]),
        ("socratic", "train", ["socratic/train-0.parquet"]),
        ("", "train", ["socratic/train-0.parquet"]),
        ("", "test", []),
        ("other", "train", []),
    ],
)
def test_the_card_says_which_files_are_a_split(subset, split, files):
    assert files_of_split(CARD, PATHS, subset, split) == files


@pytest.mark.parametrize(
    "card", ["", "no front matter", "---\nlicense: mit\n---\n", "---\n: [\n---\n", "---\n- a\n---\n"]
)
@pytest.mark.parametrize(
    ("paths", "subset", "split", "files"),
    [
        (PATHS, "main", "train", PATHS[1:3]),
        (PATHS, "main", "test", PATHS[3:4]),
        (
            ["data/train-00000-of-00001.parquet", "data/test-0.parquet"],
            "",
            "train",
            ["data/train-00000-of-00001.parquet"],
        ),
        (["train.jsonl", "training_notes.json", "test.jsonl"], "", "train", ["train.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], "", "test", ["test/a.jsonl"]),
        (["deepscaler.json", "README.md", "model.py"], "", "train", ["deepscaler.json"]),
        (["deepscaler.json"], "", "test", []),
        (["all.jsonl", "test.jsonl"], "", "train", []),
    ],
)
def test_without_a_word_of_the_card_the_names_say_it(card, paths, subset, split, files):
    assert files_of_split(card, paths, subset, split) == files


def test_a_pattern_stays_within_a_folder_unless_it_says_otherwise():
    paths = ["data/a.parquet", "data/b/c.parquet"]
    assert matching(paths, ["data/*.parquet"]) == ["data/a.parquet"]
    assert matching(paths, ["data/**.parquet"]) == paths
    assert matching(paths, ["data/b/c.parquet", "absent"]) == ["data/b/c.parquet"]


def test_one_configuration_is_the_default_and_so_is_one_of_that_name():
    one = "---\nconfigs:\n- config_name: only\n  data_files: a.jsonl\n---\n"
    named = (
        "---\nconfigs:\n- config_name: b\n  data_files: b.jsonl\n- config_name: default\n  data_files: a.jsonl\n---\n"
    )
    for card in (one, named):
        assert files_of_split(card, ["a.jsonl", "b.jsonl"], "", "train") == ["a.jsonl"]

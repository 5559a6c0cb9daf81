"""Sections that the user names: `data.sources.NAME`."""

from pathlib import Path

import pytest

from posttrain.config.data import sources_of
from posttrain.config.load import dump_resolved, experiment_of, load_resolved, merge, run_name
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
TWO = "data.sources.sums.train_file=sums.jsonl data.sources.sums.weight=3 data.sources.words.reward=exact_match"


def resolve(words: str = "", **more):
    return merge({"model": "tiny", "site": "local", "set": words, **more}, CONFIG_DIR)


def test_rows_are_sections_with_names_of_the_users() -> None:
    resolved = resolve(TWO)
    sums, words = resolved.config.data.sources.values()
    assert list(resolved.config.data.sources) == ["sums", "words"]
    assert (sums.train_file, sums.weight, words.train_file, words.weight) == ("sums.jsonl", 3.0, "", 1.0)
    assert resolved.origins["data.sources.sums.weight"] == "set="


def test_a_file_names_them_too(tmp_path: Path) -> None:
    rows = {"sums": {"weight": 3}, "words": {"train_file": "words.jsonl"}}
    config = resolve(data={"sources": rows}).config
    assert config.data.sources["words"].train_file == "words.jsonl"


def test_a_source_takes_what_it_does_not_say_from_data() -> None:
    data = resolve(TWO + " data.label_key=answer data.num_heldout_prompts=7").config.data
    read = sources_of(data)
    assert (read["sums"].train_file, read["sums"].label_key, read["sums"].num_heldout_prompts) == (
        "sums.jsonl",
        "answer",
        7,
    )
    assert sources_of(resolve().config.data).keys() == {""}


def test_they_are_written_down_and_read_back(tmp_path: Path) -> None:
    resolved = resolve(TWO)
    (tmp_path / "config.resolved.yaml").write_text(dump_resolved(resolved))
    assert load_resolved(tmp_path / "config.resolved.yaml") == resolved.config
    assert "data.sources" not in dump_resolved(resolve())


def test_they_are_part_of_the_experiment_and_their_absence_is_not() -> None:
    assert experiment_of(resolve(TWO).config)["data"]["sources"]["sums"]["weight"] == 3.0
    assert "sources" not in experiment_of(resolve().config)["data"]
    names = {run_name(resolve(words).config, "") for words in ("", TWO, TWO.replace("weight=3", "weight=2"))}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("data.sources.sums.wieght=3", "did you mean 'data.sources.sums.weight'"),
        ("data.sources.sums.weight=0", "more than 0"),
        ("data.sources.sums.weight=much", "a number"),
        ("data.sources.sums.kind=parquet", "one of sort_digits"),
        ("data.sources.sums.kind=hub", "owner/name"),
        ("data.sources.a/b.weight=3", "letters, digits"),
        ("data.sources.sums=3", "a known key"),
        ("data.sources=3", "did you mean 'data.sources.NAME."),
        ("data.sources.*.weight=3", "a known key"),
    ],
)
def test_what_is_wrong_in_them_is_told(words: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(words)
    assert reason in str(refused.value)
    assert ".".join(words.partition("=")[0].split(".")[:2]) in str(refused.value)

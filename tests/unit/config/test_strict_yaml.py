from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.support.rejections import rejected

from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.config.load import merge
from posttrain.config.strict_yaml import MAX_DEPTH, MAX_VALUES, faults_of, read_mapping
from posttrain.errors import ConfigError


def refused(text: str, folder: Path) -> list[str]:
    """Return the values of the problems of a file; nothing may be constructed of it."""
    path = folder / "mine.yaml"
    path.write_text(text)

    def construct(text: str) -> None:
        raise AssertionError("constructed before it was checked")

    with pytest.raises(ConfigError) as caught:
        read_mapping(path, load=construct)
    assert all(problem.key == str(path) and problem.allowed and problem.remedy for problem in caught.value.problems)
    return [problem.value for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr: 1\neps: 2\nlr: 3\n", ["line 3: 'lr' for the second time; the first is on line 1"]),
        ("a: {x: 1}\nb: 1\na: {y: 2}\n", ["line 3: 'a' for the second time; the first is on line 1"]),
        ("a:\n  x: 1\n  'x': 2\n", ["line 3: 'x' for the second time; the first is on line 2"]),
        ("- [{x: 1, x: 2}]\n", ["line 1: 'x' for the second time; the first is on line 1"]),
        ('{\n\t"a": 1,\n\t"a": 2}\n', ["line 3: 'a' for the second time; the first is on line 2"]),
        ("1: 2\n", ["line 1: the key 1, which YAML does not read as text"]),
        ("on: 2\n", ["line 1: the key on, which YAML does not read as text"]),
        ("? [a]\n: 2\n", ["line 1: a key that is no single word"]),
        ("a: 0100\n", ["line 1: 0100, which YAML reads as 64"]),
        ("a: [1:30]\n", ["line 1: 1:30, which YAML reads as 90"]),
        ("a: &a [*a]\n", ["line 1: *a inside of itself"]),
        (
            "a: 1\na: 2\n1: 3\n",
            ["line 2: 'a' for the second time; the first is on line 1", "line 3: the key 1, which YA"],
        ),
    ],
)
def test_what_yaml_would_drop_or_misread_is_rejected_with_its_lines(
    text: str, found: list[str], tmp_path: Path
) -> None:
    for value, start in zip(refused(text, tmp_path), found, strict=True):
        assert value.startswith(start)


def test_each_mapping_has_keys_of_its_own() -> None:
    assert not list(faults_of("a: {x: 1, y: {x: 2}}\nb: {x: 1}\nc: [{x: 1}, {x: 2}]\nx: '0100'\nd: 0\ne: 2026-11-28\n"))
    assert not list(faults_of("base: &base {x: 1}\nmine: {<<: *base, x: 2}\n")), "a merge may be overridden"


@pytest.mark.parametrize("kind", ["lists", "mappings", "merges"])
def test_aliases_count_in_full_before_anything_is_constructed(kind: str, tmp_path: Path) -> None:
    """Ten values a level: the fourth level passes the limit, far below what would hurt."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 5):
        uses = ", ".join(
            {"lists": "*a{0}", "mappings": "x{1}: *a{0}", "merges": "x{1}: {{<<: *a{0}}}"}[kind].format(level - 1, use)
            for use in range(10)
        )
        lines.append(f"a{level}: &a{level} " + (f"[{uses}]" if kind == "lists" else f"{{{uses}}}"))
    assert refused("\n".join(lines), tmp_path) == [f"line 5: more than {MAX_VALUES} values or {MAX_DEPTH} levels"]
    assert not list(faults_of("\n".join(lines[:4])))


def test_depth_size_and_length_are_bounded(tmp_path: Path) -> None:
    """32 levels, 10,000 values (a mapping, a key, two lists and what is in them) and a MiB pass; one more does not."""
    limit = "more than 10000 values or 32 levels"
    assert refused("a:\n - " + "[" * 31 + "]" * 31, tmp_path) == [f"line 2: {limit}"]
    assert refused("a:\n - [" + "1," * 9_997 + "]", tmp_path) == [f"line 2: {limit}"]
    assert refused("a: &x 1\nb: [" + "*x," * 9_996 + "]", tmp_path) == [f"line 2: {limit}"]
    assert refused("#" * (2**20 + 1), tmp_path) == ["more than 1048576 bytes"]
    for text in (
        "a:\n - " + "[" * 30 + "]" * 30,
        "a:\n - [" + "1," * 9_996 + "]",
        "a: &x 1\nb: [" + "*x," * 9_995 + "]",
    ):
        assert not list(faults_of(text))
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1\n".ljust(2**20, "#"))
    assert read_mapping(path) == {"a": 1}


LINE, FILE, SECTION = "correct that line", "correct the path or the file", "write `section: {key: value}`"


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        (b"a: 1\nb: [\n", "line 3: while parsing a flow node did not find expected node content", LINE),
        (b"a: 1\n---\nb: 2\n", "line 2: expected a single document in the stream but found another document", LINE),
        (b"a: !!python/name:os.system x\n", "line 1: could not determine a constructor", LINE),
        (b"a: \xff\n", "'utf-8' codec can't decode byte 0xff", FILE),
        (b"- 1\n", "a list at its top level", SECTION),
        (b"tiny\n", "a str at its top level", SECTION),
    ],
)
def test_a_broken_file_is_a_problem_with_its_line(text: bytes, found: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    for name in ("", "my file"):
        with pytest.raises(ConfigError) as caught:
            read_mapping(path, name)
        (problem,) = caught.value.problems
        assert problem.value.startswith(found)
        assert (problem.key, problem.remedy) == (name or str(path), remedy)
        assert problem.allowed == "a YAML file of keys and values"


def test_values_are_constructed_by_who_is_asked_to_once_they_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1\n")
    assert read_mapping(path, load=lambda text: {"made of": text}) == {"made of": "a: 1\n"}


def test_an_empty_file_has_no_keys_and_json_may_have_tabs(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("# nothing yet\n")
    assert read_mapping(path) == {}
    path.write_text('{\n\t"a": {\n\t\t"b": 1}}\n')
    assert read_mapping(path) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("model: {name: a, name: b}\n", "not-strict-yaml"),
        ("1: 2\n", "not-strict-yaml"),
        ("model: [\n", "not-yaml"),
        ("- model\n", "not-a-mapping"),
        ("model\n", "not-a-mapping"),
    ],
)
def test_every_way_in_is_strict(text: str, code: str, tmp_path: Path) -> None:
    """A file for --configfile, and every layer of a folder of one's own."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with rejected(code, key=str(path)):
        read_request(CONFIG_DIR, [path], [])
    for folder, names in {
        "models": {"model": "mine"},
        "recipes": {"recipe": "mine"},
        "hardware": {"hardware": "mine"},
        "sites": {"site": "mine"},
        "suites": {"suites": "mine"},
    }.items():
        own = tmp_path / f"own_{folder}" / folder
        own.mkdir(parents=True)
        (own / "mine.yaml").write_text(text)
        with rejected(code, key=str(own / "mine.yaml")):
            merge({"model": "tiny", "site": "local", "configs": str(own.parent), **names}, CONFIG_DIR)


def test_all_files_of_this_project_pass() -> None:
    paths = list(CONFIG_DIR.rglob("*.yaml"))
    assert len(paths) > 30
    for path in paths:
        assert read_mapping(path) == yaml.safe_load(path.read_text())

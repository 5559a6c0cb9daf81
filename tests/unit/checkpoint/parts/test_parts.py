import json

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.parts.fill_folder import clear, current_path
from posttrain.checkpoint.parts.parts import (
    OutputFile,
    copy_other_files,
    description_path,
    write_files,
)
from posttrain.checkpoint.parts.steps import read_parts, write_part_receipt
from posttrain.errors import CheckpointError
from posttrain.store import Receipt, building, part_receipt_of, partial_of, receipt_of

INPUTS = {"source": "5" * 64}
STEP = "quantize_rollout_fp8"
WANTED = Receipt(STEP, (), INPUTS, {})


class Maker:
    """Makes files with a given content and counts how often it had to."""

    def __init__(self):
        self.written = []

    def file(self, name, content, source="s1"):
        def write(output):
            self.written.append(name)
            output.write(content)
            return {"length": len(content)}

        return OutputFile(name, len(content), {"source": source, "content": content.decode()}, write)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def maker():
    return Maker()


def finish(folder, parts):
    """Write part receipts and give the folder its name."""
    for part, made in enumerate(parts):
        settings = {"part": part, "num_parts": len(parts)}
        write_part_receipt(part_receipt_of(folder, part), STEP, made, INPUTS, settings, started=0.0)
    with building(folder):
        pass
    receipt_of(folder).write_text("{}")


def test_files_are_made_once_and_described(folder, maker):
    files = [maker.file("a", b"abc"), maker.file("b", b"")]
    made = write_files(folder, files, "test", num_threads=2)
    assert [(item.record.path, item.record.size_bytes, item.notes) for item in made] == [
        ("a", 3, {"length": 3}),
        ("b", 0, {"length": 0}),
    ]
    assert (partial_of(folder) / "a").read_bytes() == b"abc"
    assert write_files(folder, files, "test") == made
    assert sorted(maker.written) == ["a", "b"]


@pytest.mark.parametrize("content", [b"abd", b"ab", b"", None])
def test_only_the_broken_file_is_made_again(folder, maker, content):
    files = [maker.file("a", b"abc"), maker.file("b", b"xyz")]
    made = write_files(folder, files, "test")
    path = partial_of(folder) / "a"
    path.unlink() if content is None else path.write_bytes(content)
    assert write_files(folder, files, "test") == made
    assert maker.written == ["a", "b", "a"]
    assert path.read_bytes() == b"abc"


def test_a_file_without_description_is_made_again(folder, maker):
    write_files(folder, [maker.file("a", b"abc")], "test")
    description_path(folder, "a").unlink()
    write_files(folder, [maker.file("a", b"abc")], "test")
    assert maker.written == ["a", "a"]


def test_another_source_makes_all_again(folder, maker):
    write_files(folder, [maker.file("a", b"abc")], "test")
    write_files(folder, [maker.file("a", b"abc", source="s2")], "test")
    assert maker.written == ["a", "a"]


def test_a_finished_folder_stays_when_nothing_has_to_change(folder, maker):
    files = [maker.file("a", b"abc")]
    finish(folder, [write_files(folder, files, "test")])
    write_files(folder, files, "test")
    assert current_path(folder) == folder
    assert receipt_of(folder).exists()
    assert maker.written == ["a"]


def test_a_finished_folder_loses_its_name_and_receipt_before_it_changes(folder, maker):
    finish(folder, [write_files(folder, [maker.file("a", b"abc")], "test")])

    def write(output):
        assert not folder.exists()
        assert not receipt_of(folder).exists()
        output.write(b"new")
        return {}

    write_files(folder, [OutputFile("a", 3, {"source": "other"}, write)], "test")
    assert current_path(folder) == partial_of(folder)
    assert (partial_of(folder) / "a").read_bytes() == b"new"


def test_a_disk_that_is_too_small_is_known_before_the_first_byte(folder, maker):
    huge = OutputFile("a", 1 << 60, {}, lambda output: maker.written.append("a"))
    with pytest.raises(OSError, match="not enough disk space"):
        write_files(folder, [huge], "test")
    assert maker.written == []


def test_an_error_leaves_no_half_file(folder, maker):
    def write(output):
        output.write(b"half")
        raise CheckpointError("some-code", "bad tensor")

    with rejected("some-code"):
        write_files(folder, [maker.file("a", b"abc"), OutputFile("b", 4, {}, write)], "test", num_threads=2)
    assert [path.name for path in partial_of(folder).iterdir() if path.name != "a"] == []


# ---- joining parts ----


def test_parts_are_joined_in_any_order(folder, maker):
    parts = [write_files(folder, [maker.file(name, name.encode())], "test") for name in ("a", "b")]
    finish(folder, parts)
    receipts = [part_receipt_of(folder, 1), part_receipt_of(folder, 0)]
    joined = read_parts(folder, receipts, WANTED, ["b", "a"])
    assert list(joined) == ["a", "b"]
    assert joined["b"] == parts[1][0]


@pytest.mark.parametrize(
    ("step", "inputs", "which", "code", "found"),
    [
        ("convert_hf_to_torch_dist", INPUTS, [0, 1], "parts-do-not-fit", "quantize_rollout_fp8"),
        (STEP, {"source": "6" * 64}, [0, 1], "parts-do-not-fit", "another source"),
        (STEP, INPUTS, [0], "parts-do-not-fit", "0 to 0"),
        (STEP, INPUTS, [0, 0], "parts-do-not-fit", "0 to 1"),
        (STEP, INPUTS, [0, 1, 2], "receipt-missing", ""),
    ],
)
def test_parts_that_do_not_fit_are_refused(folder, maker, step, inputs, which, code, found):
    finish(folder, [write_files(folder, [maker.file(name, b"x")], "test") for name in ("a", "b")])
    with rejected(code, found):
        read_parts(folder, [part_receipt_of(folder, part) for part in which], Receipt(step, (), inputs, {}), ["a", "b"])


@pytest.mark.parametrize("content", [None, b"xy"])
def test_a_part_whose_file_is_gone_or_short_is_refused(folder, maker, content):
    finish(folder, [write_files(folder, [maker.file("a", b"xyz")], "test")])
    (folder / "a").unlink()
    if content is not None:
        (folder / "a").write_bytes(content)
    with rejected("parts-do-not-fit", "expected 3 bytes") as error:
        read_parts(folder, [part_receipt_of(folder, 0)], WANTED, ["a"])
    assert str(folder / "a") in str(error.value)


def test_a_description_that_is_none_is_refused(folder, maker):
    write_files(folder, [maker.file("a", b"x")], "test")
    description_path(folder, "a").write_text(json.dumps({"made_from": "x"}))
    with rejected("description-invalid"):
        write_files(folder, [maker.file("a", b"x")], "test")


# ---- the last step ----


def test_strangers_go_and_the_rest_stays(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", ".a.host.1.tmp", "sub/c", "sub/d"):
        (tmp_path / name).write_text("")
    clear(tmp_path, keep={"a", "sub/c"})
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"a", "sub/c"}


def test_everything_but_weights_is_copied(tmp_path):
    source, destination = tmp_path / "source", tmp_path / "destination"
    for name in (
        "config.json",
        "tokenizer.json",
        "x.safetensors",
        "model.safetensors.index.json",
        "sub/t.jinja",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "linked.json").symlink_to(source / "tokenizer.json")
    names = copy_other_files(source, destination, skip=["config.json"])
    assert names == ["linked.json", "sub/t.jinja", "tokenizer.json"]
    assert (destination / "linked.json").read_text() == "tokenizer.json"
    assert not (destination / "linked.json").is_symlink()

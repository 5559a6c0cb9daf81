import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.config_patch import (
    PATCH_FILE,
    Change,
    apply_changes,
    read_patch,
    undo_patch,
    write_patched,
)

RENAME = Change("rename", "/b", "b", "c")
REPLACE = Change("replace", "/a", 1, [2])


def test_changes_keep_the_place_of_a_key():
    before = {"x": 0, "b": 5, "a": 1}
    after = apply_changes(before, [RENAME, REPLACE], "f")
    assert list(after.items()) == [("x", 0), ("c", 5), ("a", [2])]
    assert before == {"x": 0, "b": 5, "a": 1}


def test_a_change_that_is_made_already_is_left_alone():
    once = apply_changes({"a": 1, "b": 5}, [RENAME, REPLACE], "f")
    assert apply_changes(once, [RENAME, REPLACE], "f") == once


@pytest.mark.parametrize(
    ("content", "change", "data"),
    [
        ({"a": 3}, REPLACE, ["f: ", "3", "1", "[2]"]),
        ({}, REPLACE, ["f: ", "None"]),
        ({"d": 0}, RENAME, ["f: ", "'b'", "'c'"]),
        ({"b": 0, "c": 0}, RENAME, ["f: ", "'b'", "'c'"]),
    ],
)
def test_something_else_than_before_or_after_is_refused(content, change, data):
    with rejected("patch-does-not-apply", *data):
        apply_changes(content, [change], "f")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _json, min_size=1), st.data())
def test_the_reverse_gives_back_values_and_order(content, data):
    key = data.draw(st.sampled_from(sorted(content)))
    changes = [
        Change("replace", f"/{key}", content[key], data.draw(_json)),
        Change("rename", f"/{key}", key, key + "!"),
    ]
    if key + "!" in content:
        return
    after = apply_changes(content, changes, "f")
    assert list(after) == [key + "!" if name == key else name for name in content]
    back = apply_changes(after, [change.reverse for change in reversed(changes)], "f")
    assert list(back.items()) == list(content.items())


def test_the_record_on_disk_gives_back_the_files(tmp_path):
    before = {"z": "ä", "a": 1, "b": ["<|end|>"]}
    text = json.dumps(before, indent=2, ensure_ascii=False) + "\n"
    (tmp_path / "config.json").write_text(text)
    patch = {"config.json": [REPLACE, RENAME]}
    write_patched(tmp_path, {"config.json": apply_changes(before, patch["config.json"], "")}, patch)
    assert json.loads((tmp_path / PATCH_FILE).read_text()) == {
        "config.json": [
            {"op": "replace", "path": "/a", "old": 1, "new": [2]},
            {"op": "rename", "path": "/b", "old": "b", "new": "c"},
        ]
    }
    assert read_patch(tmp_path) == patch
    undo_patch(tmp_path)
    assert (tmp_path / "config.json").read_text() == text
    assert not (tmp_path / PATCH_FILE).exists()
    undo_patch(tmp_path)
    assert (tmp_path / "config.json").read_text() == text


def test_an_undo_that_was_cut_short_goes_on(tmp_path):
    patch = {"one.json": [REPLACE], "two.json": [REPLACE]}
    write_patched(tmp_path, {"one.json": {"a": 1}, "two.json": {"a": [2]}}, patch)
    undo_patch(tmp_path)
    assert [json.loads((tmp_path / name).read_text()) for name in patch] == [{"a": 1}, {"a": 1}]


def test_a_file_changed_by_hand_since_is_not_overwritten(tmp_path):
    write_patched(tmp_path, {"one.json": {"a": "by hand"}}, {"one.json": [REPLACE]})
    with rejected("patch-does-not-apply", "one.json: a is 'by hand'"):
        undo_patch(tmp_path)
    assert (tmp_path / PATCH_FILE).exists()


def test_a_record_that_is_none(tmp_path):
    (tmp_path / PATCH_FILE).write_text('{"config.json": [{"what": 1}]}')
    with rejected("patch-unreadable"):
        read_patch(tmp_path)

"""JSON of others: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json

import pytest

from posttrain.store import parse_json, read_json

DEEP = 200_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * DEEP, "nested too deeply"),
        ('{"a":' * DEEP, "nested too deeply"),
        ('"\\ud800"', r"holds half a character, \\ud800"),
        ('{"a": ["x\\udc80y"]}', r"holds half a character, \\udc80"),
        ('{"\\udfff": 1}', r"holds half a character, \\udfff"),
        ('"\\ude00\\ud83d"', "holds half a character"),
        (b'"\xed\xa0\x80"', "utf-8"),
        (b"\x80\x04", "utf-8"),
        ("", "Expecting value"),
        ("1" * 5000, "Exceeds the limit"),
    ],
    ids=["list", "object", "high", "within", "key", "wrong order", "bytes", "pickle", "nothing", "digits"],
)
def test_what_is_wrong_has_a_reason(tmp_path, text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=reason):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("content", [{"a": [1, 2.5, None, True]}, "\U0001f600", "\\ud800", "é", []])
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_right_json_is_read(content, ensure_ascii):
    text = json.dumps(content, ensure_ascii=ensure_ascii)
    assert parse_json(text) == parse_json(text.encode()) == content

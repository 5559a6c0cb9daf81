"""Every rejection has a code, and a code means one thing."""

from __future__ import annotations

import re
import runpy
from collections import defaultdict

import pytest
from tests.support.rejections import assert_rejected, rejected
from tests.support.workflow_runs import ROOT

from posttrain.errors import CheckpointError, ConfigError, Problem

REJECTIONS = runpy.run_path(str(ROOT / "docs/rejections.py"))
FOUND = REJECTIONS["find_rejections"](ROOT)


def test_every_rejection_has_a_code():
    assert len(FOUND) > 500, "the search finds no rejections"
    assert [place for _, code, place in FOUND if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)] == []


def test_a_code_belongs_to_one_class():
    kinds = defaultdict(set)
    for kind, code, _ in FOUND:
        kinds[code].add(kind)
    assert {code: found for code, found in kinds.items() if len(found) > 1} == {}


def test_the_page_has_every_code():
    page = REJECTIONS["render_page"](ROOT)
    assert all(page.count(f"| `{code}` |") == 1 for _, code, _ in FOUND)


def test_places_without_a_code_are_found(tmp_path):
    source = """
def _failed(code, key):
    return Problem(code, key, "1", "2", "3")
def ours(error, words):
    raise CheckpointError(words, "text")
def passed_on(error):
    raise CheckpointError(error.code, "text")
found = [_failed("not-a", "b"), _failed(key, "b"), Problem("not-b", "c", "1", "2", "3"), Problem(**read)]
"""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/a.py").write_text(source)
    found = [
        (kind, code, int(place.rpartition(":")[2])) for kind, code, place in REJECTIONS["find_rejections"](tmp_path)
    ]
    assert sorted(found) == [
        ("CheckpointError", "", 5),
        ("Problem", "", 8),
        ("Problem", "not-a", 8),
        ("Problem", "not-b", 8),
    ]


LR = Problem("out-of-range", "optimizer.lr", "-1", "above 0", "choose 1e-6")
SHARD = CheckpointError("shard-empty", "a.safetensors: empty\n  remedy: copy it again")


@pytest.mark.parametrize(
    ("error", "code", "data", "key"),
    [
        (ConfigError([LR]), "out-of-rang", [], None),
        (ConfigError([LR]), "out-of-range", [], "optimizer.l"),
        (ConfigError([LR]), "out-of-range", ["1e-7"], "optimizer.lr"),
        (SHARD, "shard", [], None),
        (SHARD, "shard-empty", [], "a"),
        (SHARD, "shard-empty", ["b.safetensors"], None),
    ],
)
def test_the_helpers_notice_another_rejection(error, code, data, key):
    with pytest.raises(AssertionError), rejected(code, *data, key=key):
        raise error
    with pytest.raises(AssertionError):
        assert_rejected(str(error), code, *data, key=key)


def test_the_helpers_accept_what_is_expected():
    with rejected("out-of-range", "-1", "1e-6", key="optimizer.lr"):
        raise ConfigError([Problem("unknown-key", "a", "b", "c", "d"), LR])
    with rejected("shard-empty", "a.safetensors"):
        raise SHARD
    assert_rejected(f"log: {ConfigError([LR])}", "out-of-range", "-1", key="optimizer.lr")
    assert_rejected(f"verify: {SHARD}\nmore", "shard-empty", "a.safetensors")

"""What is shown of what others wrote."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import jinja2
import pytest
from tests.support.rejections import rejected

from posttrain.errors import CheckpointError, ConfigError, Problem, one_line, printable, raise_if_any, reason_of
from posttrain.report import report_page
from posttrain.report.logging import configure_logging

# What a terminal, a log or a page is sent -> what is shown.
SHOWN = {
    "plain, with é and 中\n\tand a second line": "plain, with é and 中\n\tand a second line",
    "clear\x1b[2Jscreen": "clear\\x1b[2Jscreen",
    "\x9b31m": "\\x9b31m",
    "over\rwritten": "over\\rwritten",
    "\x00\x07\x08\x7f": "\\x00\\x07\\x08\\x7f",
    "half \ud800 and \udc80": "half \\ud800 and \\udc80",
    "\u202egnp.exe\u202c": "\\u202egnp.exe\\u202c",
    "http://user:word@host:1/x?a=b@c": "http://***@host:1/x?a=b@c",
    "see https://u@h and ftp://a:b@c@d/": "see https://***@h and ftp://***@d/",
    "mail@example.org, s3://bucket/a@b": "mail@example.org, s3://bucket/a@b",
}


@pytest.mark.parametrize("text", SHOWN)
def test_control_characters_are_named_and_credentials_left_out(text):
    assert printable(text) == SHOWN[text]
    assert CheckpointError("some-code", f"a: {text}").text == f"a: {SHOWN[text]}"
    told = str(ConfigError([Problem("some-code", text, text, text, text)])).replace(" [some-code]", "")
    assert told.count(SHOWN[text]) == 4


@pytest.mark.parametrize("text", SHOWN)
def test_a_name_stays_in_its_line(text):
    assert one_line(text) == SHOWN[text].replace("\n", "\\n")


@pytest.mark.parametrize("text", SHOWN)
def test_a_log_shows_no_more(tmp_path, monkeypatch, text):
    monkeypatch.setenv("POSTTRAIN_LOG", str(tmp_path / "log"))
    before = logging.getLogger().handlers[:]
    try:
        configure_logging()
        logging.getLogger("posttrain.test").warning("%s is there", text)
        logging.getLogger("posttrain.test").error("with a traceback", exc_info=RuntimeError(text))
    finally:
        logging.basicConfig(handlers=before, force=True)
    written = (tmp_path / "log").read_text(encoding="utf-8")
    assert f"posttrain.test: {SHOWN[text]} is there" in written
    assert f"RuntimeError: {SHOWN[text]}" in written


def test_a_page_shows_no_more(monkeypatch):
    pages = jinja2.Environment(loader=jinja2.DictLoader({"page": "<p>{{ text }}</p>"}), autoescape=True)
    monkeypatch.setattr(report_page, "_environment", lambda: pages)
    assert report_page.render_page("page", text="a\x1b[2J<b>\ud800") == "<p>a\\x1b[2J&lt;b&gt;\\ud800</p>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Weights only load failed. Run it.\n\nUnsupported GLOBAL a.b\nSee", "Unsupported GLOBAL a.b"),
        ("Weights only load failed. Run it.\n\nUnsupported operand 149", "it holds more than tensors and plain values"),
        ("first\nsecond", "first"),
        ("", "ValueError"),
    ],
)
def test_a_reason_is_one_line(text, reason):
    assert reason_of(ValueError(text)) == reason


LR = Problem("out-of-range", "optimizer.lr", "-1", "above 0", "choose 1e-6")
LR_TOLD = """  - optimizer.lr = -1 [out-of-range]
      allowed: above 0
      remedy:  choose 1e-6"""


def test_all_problems_are_told_and_kept():
    with pytest.raises(ConfigError) as one:
        raise_if_any([LR])
    assert str(one.value) == f"1 problem in the configuration:\n{LR_TOLD}"
    assert one.value.problems == (LR,)
    with pytest.raises(ConfigError) as two:
        raise_if_any([LR, LR], "config/README.md explains every key")
    told = f"2 problems in the configuration:\n{LR_TOLD}\n{LR_TOLD}\nconfig/README.md explains every key"
    assert str(two.value) == told
    assert two.value.problems == (LR, LR)
    raise_if_any([], "no matter")


def test_a_problem_as_plan_json_has_it():
    expected = {"key": "optimizer.lr", "value": "-1", "allowed": "above 0", "remedy": "choose 1e-6"}
    assert LR.as_dict() == {"code": "out-of-range"} | expected


def test_the_code_ends_the_first_line():
    assert (
        str(CheckpointError("shard-empty", "a: empty\n  remedy: copy it"))
        == "a: empty [shard-empty]\n  remedy: copy it"
    )
    assert str(Problem("rows-invalid", "data", "2 lines:\n  line 1", "JSON", "correct it")).startswith(
        "data = 2 lines: [rows-invalid]\n  line 1\n      allowed: JSON"
    )


def test_rejections_cross_processes():
    checkpoint = CheckpointError("shard-empty", "a: empty\nb")
    checkpoint.add_note("on node-2")
    config = ConfigError([LR, LR], "see the reference")
    for error in (checkpoint, config):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (type(error), str(error))
        assert vars(copied) == vars(error)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool, rejected("shard-empty", "b.safetensors"):
        pool.submit(_reject, "shard-empty", "b.safetensors: empty").result()


def _reject(code: str, text: str) -> None:
    raise CheckpointError(code, text)

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from tests.synthetic_run import make_run

from posttrain.observability.report import common_frame, describe_attempt, pair_samples, render_report
from posttrain.observability.report_data import read_run
from posttrain.observability.report_summary import summarize

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects text, references and ids of a page, and checks that its tags are balanced."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.references, self.ids, self.charts = [], [], [], set(), 0
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.references += [values[name] for name in ("src", "href") if name in values]
        self.ids |= {values["id"]} if "id" in values else set()
        self.charts += values.get("class") == "chart"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("run"), num_steps=40).inputs)


@pytest.fixture(scope="module")
def html(run):
    return render_report(run, summarize(run))


def test_the_page_needs_no_network_and_its_links_lead_somewhere(html):
    page = Page(html)
    assert {reference for reference in page.references if not reference.startswith("#")} == {"data:,"}
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= page.ids
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", html)


def test_the_page_shows_what_an_engineer_looks_for(run, html):
    text = " ".join(Page(html).text)
    wanted = (
        run.run_name,
        "glm_moe_dsa",
        "26.4 %",
        "93.1 %",
        run.final_weights_sha256,
        "Trainer against engine",
        "Clip fraction",
        "Response length",
        "Gradient norm",
        "Time per step",
        "Throughput",
        "was ended by SIGKILL",
        "train_grpo",
        "optimizer.lr",
        "config/models/tiny.yaml",
        run.versions["torch"],
        "weights served",
        "Reward and pass rate",
    )
    assert [piece for piece in wanted if piece not in text] == []
    assert Page(html).charts == 16


def test_every_sampled_prompt_stands_beside_its_responses(run, html):
    text = " ".join(Page(html).text)
    for before, after in zip(run.before["examples"], run.after["examples"], strict=True):
        digits = before["prompt"].rpartition(" ")[2]
        assert digits in text
        assert before["response"] in text
        assert after["response"] in text


def test_what_models_write_cannot_become_part_of_the_page(run):
    nasty = '</pre><script>alert("x")</script>&amp;'
    examples = [{"prompt": nasty, "response": nasty, "label": nasty, "reward": 0.0}]
    changed = dataclasses.replace(
        run, before={**run.before, "examples": examples}, after={**run.after, "examples": examples}
    )
    html = render_report(changed, summarize(run))
    assert '<script>alert("x")' not in html
    assert nasty in "".join(Page(html).text)


def test_long_responses_and_long_runs_stay_small(tmp_path):
    made = make_run(tmp_path, num_steps=3000)
    run = read_run(made.inputs)
    long = [{"prompt": f"question {i}", "response": "word " * 40_000, "label": "7", "reward": 1.0} for i in range(24)]
    run = dataclasses.replace(run, before={**run.before, "examples": long}, after={**run.after, "examples": long})
    html = render_report(run, summarize(run))
    assert len(html.encode()) < 2_000_000
    assert "characters …" in html


def test_metrics_that_were_not_recorded_are_named_and_not_drawn(tmp_path):
    made = make_run(tmp_path, num_steps=3)
    path = made.paths.train / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({"step": row["step"], "rollout/reward_mean": 0.5}) + "\n" for row in rows))
    run = read_run(made.inputs)
    html = render_report(run, summarize(run))
    page = Page(html)
    assert page.charts == 1
    assert "Not recorded in this run" in " ".join(page.text)
    assert "mismatch/abs_diff_mean" in " ".join(page.text)


def test_an_attempt_is_told_in_words():
    row = {
        "attempt": 2,
        "epoch": 3,
        "started_unix": 1795000000.0,
        "ended_unix": 1795000192.4,
        "reason": "done",
    }
    assert describe_attempt(row) == {
        "attempt": "2",
        "started (UTC)": "2026-11-18 11:06:40",
        "lasted": "3 min 12 s",
        "ended": "done",
        "epoch": "3",
    }


def test_samples_are_paired_by_prompt():
    def example(prompt, reward):
        return {"prompt": prompt, "response": "r", "label": "l", "reward": reward}

    before = [example("a", 0.0), example("b", 1.0), example("a", 1.0), example("c", 1.0)]
    after = [example("b", 1.0), example("a", 1.0), example("c", 0.0)]
    pairs = pair_samples(before, after)
    assert [(pair.prompt, len(pair.before), len(pair.after), pair.change) for pair in pairs] == [
        ("a", 2, 1, "better"),
        ("b", 1, 1, "same"),
        ("c", 1, 1, "worse"),
    ]


@pytest.mark.parametrize(
    ("prompts", "frame"),
    [
        (["<user>sort 31 now", "<user>sort 35 now"], ("<user>sort ", " now")),
        (["3141", "3145"], ("", "")),
        (["one"], ("", "")),
        ([], ("", "")),
        (["a b c", "a b c"], ("a b ", "")),
    ],
)
def test_the_frame_of_prompts_tears_no_word(prompts, frame):
    assert common_frame(prompts) == frame
    assert all(len(prompt) >= len(frame[0]) + len(frame[1]) for prompt in prompts)

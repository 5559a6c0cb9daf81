import dataclasses
import json
import re
import shutil
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser

import pytest
from tests.support.rejections import rejected
from tests.support.synthetic_run import REPOSITORY, make_run, workflow_of

from posttrain.plan.resolve import resolve
from posttrain.plan.rule_chain import rule_chain
from posttrain.report.report import common_frame, describe_attempt, pair_samples, rule_states
from posttrain.report.report import render_report as render
from posttrain.report.report_data import RuleTime, read_run, read_run_so_far
from posttrain.report.report_figures import queue_charts
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import judge_run
from posttrain.store import Paths, Receipt, receipt_of, records_of, write_receipt

CONFIG_DIR = REPOSITORY / "config"
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


def render_report(run, summary):
    return render(run, summary, judge_run(run))


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
        "train",
        "optimizer.lr",
        "config/models/tiny.yaml",
        run.versions["torch"],
        "weights served",
        "Reward and pass rate",
    )
    assert [piece for piece in wanted if piece not in text] == []
    for wrong in ("['", " 1 values", " 0 files", " 0 B", "230 kB"):
        assert wrong not in text
    assert "evaluation after evaluate 1 " in " ".join(text.split()), "a result is one file"
    # Learning rate and first update's ratio, which never change, are a line of text.
    assert Page(html).charts == 16
    assert "The same in every step First update's ratio, deviation from 1: 0" in " ".join(text.split())


def section_of(html, title):
    """Return a section's titles of charts with the lines of each, and what it says of metrics that do not change."""
    (section,) = re.findall(rf'<h2 id="[a-z-]+">{title}</h2>(.*?)<h2 ', html, re.DOTALL)
    charts = [json.loads(unescape(values)) for values in re.findall(r'data-values="([^"]*)"', section)]
    lines = [[line["label"] for line in chart["series"]] for chart in charts]
    flat = "".join(re.findall(r'<p class="flat">(.*?)</p>', section))
    return dict(zip(re.findall(r"<h3>(.*?)</h3>", section), lines, strict=True)), flat


def test_a_run_that_goes_ahead_shows_its_queue(tmp_path):
    made = make_run(tmp_path, num_steps=8, more="rollout.max_staleness=2 algorithm.preset=tis")
    run = read_run(made.inputs)
    html = render_report(run, summarize(run))
    charts, flat = section_of(html, "Queue")
    assert charts == {
        "Staleness": ["oldest token", "mean"],
        "Tokens by age in updates": ["0", "1", "2"],
        "Queue": ["ready", "being generated"],
    }
    assert not flat
    assert "Age in updates; at most 2 (rollout.max_staleness)." in html
    ages = next(chart for chart in queue_charts(run) if chart.is_stacked)
    shares = [[row.get(f"queue/age_{age}", 0.0) for row in run.rows] for age in range(3)]
    assert [line.values for line in ages.series] == shares
    oldest = [row["queue/staleness_max"] for row in run.rows]
    assert oldest == [0, 1, 2, 2, 2, 2, 2, 2]
    assert f'"values":{json.dumps(list(map(float, oldest)), separators=(",", ":"))}' in unescape(html)


def test_a_run_in_an_environment_shows_its_episodes(tmp_path):
    run = read_run(make_run(tmp_path, num_steps=8, recipe="calculator").inputs)
    html = render_report(run, summarize(run))
    charts, flat = section_of(html, "Episodes")
    assert charts == {
        "Turns of an episode": ["responses", "responses, p90", "calls of functions", "calls of functions, p90"],
        "Observations": ["tokens", "tokens, p90"],
        "Time of an episode": ["in the environment", "in the environment, p90", "in engines", "in engines, p90"],
        "Prefix reuse": ["in the prefix cache"],
        "Distribution of turns": ["responses", "calls of functions"],
        "Distribution of observations": ["tokens"],
        "Distribution of time": ["in the environment", "in engines"],
    }
    assert not flat
    seconds = run.after["episodes"]["curves"]["engine_seconds"]
    drawn = [float(f"{value:.5g}") for value in seconds]
    assert f'"values":{json.dumps(drawn, separators=(",", ":"))}' in unescape(html)


def test_episodes_that_are_all_alike_and_older_results(tmp_path):
    """A distribution without spread is drawn; a result of an older version has no distributions."""
    run = read_run(make_run(tmp_path, num_steps=8, recipe="calculator").inputs)
    episodes = run.after["episodes"]
    alike = episodes | {"curves": episodes["curves"] | {"observed_tokens": [5.0] * 21}}
    older = {name: value for name, value in episodes.items() if name != "curves"}
    for changed, is_shown in ((alike, True), (older, False)):
        after = run.after | {"episodes": changed}
        charts, _ = section_of(
            render_report(there := dataclasses.replace(run, after=after), summarize(there)), "Episodes"
        )
        assert ("Distribution of observations" in charts) == ("Distribution of time" in charts) == is_shown


def test_a_synchronous_run_without_an_environment_has_neither_section(html):
    assert 'id="queue"' not in html
    assert 'id="episodes"' not in html


def test_every_sampled_prompt_stands_beside_its_responses(run, html):
    text = " ".join(Page(html).text)
    for before, after in zip(run.before["examples"], run.after["examples"], strict=True):
        digits = before["prompt"].rpartition(" ")[2]
        assert digits in text
        assert before["response"] in text
        assert after["response"] in text


def test_long_responses_and_long_runs_stay_small(tmp_path):
    made = make_run(tmp_path, num_steps=3000)
    run = read_run(made.inputs)
    long = [{"prompt": f"question {i}", "response": "word " * 40_000, "label": "7", "reward": 1.0} for i in range(24)]
    run = dataclasses.replace(run, before={**run.before, "examples": long}, after={**run.after, "examples": long})
    html = render_report(run, summarize(run))
    assert len(html.encode()) < 2_000_000
    # 48 responses and 24 prompts share 1.4 million characters.
    (most,) = {len(text) for text in re.findall(r"<pre>(word [word ]+)</pre>", html)}
    assert most == 1_400_000 // 72
    assert (
        html.count("the rest is in evaluation/before.json") == html.count("the rest is in evaluation/after.json") == 24
    )


def test_what_is_cut_at_first_sight_can_be_opened(run):
    long = "a" * 401 + " the end"
    examples = [{"prompt": f"{i} {long}", "response": long, "label": "7", "reward": 1.0} for i in range(2)]
    changed = dataclasses.replace(run, before={**run.before, "examples": examples})
    html = render_report(changed, summarize(changed))
    assert html.count(f'<span class="preview">{"a" * 400} …</span><span class="all">409 characters</span>') == 2
    assert html.count(f"</summary><pre>{long}</pre></details>") == 2
    assert "the rest is in" not in html
    short = [example | {"response": "a" * 400} for example in examples]
    changed = dataclasses.replace(run, before={**run.before, "examples": short})
    assert f"<pre>{'a' * 400}</pre>" in render_report(changed, summarize(changed))


def test_metrics_that_were_not_recorded_are_named_and_not_drawn(tmp_path):
    made = make_run(tmp_path, num_steps=3)
    path = made.paths.train / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({"step": row["step"], "rollout/reward_mean": 0.5}) + "\n" for row in rows))
    run = read_run(made.inputs)
    html = render_report(run, summarize(run))
    page = Page(html)
    assert page.charts == 0
    assert "Reward and pass rate: 0.5" in " ".join(page.text)
    assert "Not recorded in this run" in " ".join(page.text)
    assert "mismatch/abs_diff_mean" in " ".join(page.text)


def test_an_attempt_is_told_in_words():
    row = {
        "attempt": 2,
        "epoch": 3,
        "nodes": ["node0", "node1"],
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
        "nodes": "node0, node1",
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


def test_of_a_run_that_trains_there_is_what_there_is(tmp_path):
    """Before its first step, in the middle, and at its end; what is missing is named."""
    made = make_run(tmp_path, num_steps=12)
    paths, metrics = made.paths, made.paths.metrics.read_text().splitlines(keepends=True)
    assert read_run_so_far(paths, made.inputs.logs, None).missing == []
    parts = {
        "the evaluation before training": paths.evaluation("before"),
        "the end of training": paths.train_done,
        "the export": receipt_of(paths.hf_export),
        "the evaluation after training": paths.evaluation("after"),
    }
    for path in (*parts.values(), records_of(paths.run)):
        path.unlink()
    for rule in ("train", "export_hf", "finalize_export_hf", "evaluate"):
        shutil.rmtree(made.inputs.logs / rule)
    # The last row is being written.
    paths.metrics.write_text("".join(metrics[:7]) + metrics[7][:20])
    run = read_run_so_far(paths, made.inputs.logs, None)
    html = render_report(run, summarize(run))
    text = " ".join("".join(Page(html).text).split())
    assert f"So far: 7 steps of 12, as of {time_of(run)} UTC. Not there yet: {', '.join(parts)}." in text
    assert "no evaluation has ended" in text
    assert "Not known yet whether it learns" in text
    states = {name: state.state for name, state in rule_states(run, rule_chain(run.config)).items()}
    unfinished = {"train", "export_hf", "finalize_export_hf", "evaluate before", "evaluate after", "render_report"}
    assert {name for name, state in states.items() if state == "not run"} >= unfinished
    assert states["patch_hf_config"] == states["download_dataset"] == "done"


def test_what_came_and_what_was_trained_are_quantised_apart(tmp_path):
    """In the picture of the rules: each with the seconds of its own jobs, and the second is not there yet."""
    made = make_run(tmp_path, num_steps=3)
    run = read_run_so_far(made.paths, made.inputs.logs, None)
    config = resolve(workflow_of(tmp_path, 3, "evaluation.precision=fp8"), CONFIG_DIR).config
    rules = rule_chain(config)
    jobs = [("rollout_fp8-1.part0", 3.0), ("export_fp8-2.part0", 5.0), ("export_fp8-2.part1", 7.0)]
    times = [RuleTime("quantize", f"tiny-3.{job}", seconds, 0.0, None) for job, seconds in jobs]
    before = rule_states(dataclasses.replace(run, times=times), rules)
    assert (before["quantize"].state, before["quantize"].seconds) == ("done", 3.0)
    assert before["quantize after"].state == "not run"
    folder = made.paths.export_fp8
    folder.mkdir(parents=True)
    write_receipt(receipt_of(folder), Receipt("quantize_export_fp8", [], {}, {}))
    run = read_run_so_far(made.paths, made.inputs.logs, None)
    after = rule_states(dataclasses.replace(run, times=times), rules)
    assert (after["quantize after"].state, after["quantize after"].seconds) == ("done", 12.0)
    assert after["quantize"].seconds == 3.0


def time_of(run):
    return datetime.fromtimestamp(run.read_unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def test_before_anything_has_run_there_is_the_configuration(tmp_path):
    made = make_run(tmp_path / "other", num_steps=3)
    paths = Paths(resolve(workflow_of(tmp_path, 5), CONFIG_DIR))
    run = read_run_so_far(paths, tmp_path / "logs", None)
    text = " ".join("".join(Page(render_report(run, summarize(run))).text).split())
    assert "So far: 0 steps of 5" in text
    assert "optimizer.lr" in text
    assert "No attempts were recorded." in text
    assert not paths.run.exists(), "reading writes nothing"
    assert made.paths.run.exists()


def test_an_attempt_that_goes_on_is_counted_until_now(tmp_path):
    made = make_run(tmp_path, num_steps=4)
    made.paths.train_done.unlink()
    ended = json.loads(made.paths.attempts.read_text().splitlines()[-1])["ended_unix"]
    for since, begin in ((ended - 500, ended), (ended + 30, ended + 30)):
        run = read_run_so_far(made.paths, made.inputs.logs, since)
        assert len(run.attempts) == 3
        last = run.attempts[-1]
        assert (last["started_unix"], last["ended_unix"], last["reason"]) == (begin, run.read_unix, "goes on")
    made.paths.attempts.unlink()
    (only,) = read_run_so_far(made.paths, made.inputs.logs, 5.0).attempts
    assert only["started_unix"] == 5.0


def test_what_is_damaged_is_refused_also_while_it_trains(tmp_path):
    made = make_run(tmp_path, num_steps=4)
    made.inputs.after.write_text("{")
    made.paths.train_done.unlink()
    with rejected("result-unreadable", "after.json"):
        read_run_so_far(made.paths, made.inputs.logs, None)

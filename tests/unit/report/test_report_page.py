"""What others write (models, datasets, attempts, receipts, configurations) stays text on the page, and can be seen."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import jinja2
import pytest
from tests.support.synthetic_run import make_run

from posttrain.errors import Problem
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_page import render_plan
from posttrain.report.provenance import Artifact
from posttrain.report.report import render_report
from posttrain.report.report_data import RunData, read_run
from posttrain.report.report_page import CONTROLS, _environment, render_page
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import Finding, Verdict, judge_run
from posttrain.store import Receipt

NASTY = "</pre></title></style><script>alert('x')</script><img src=x onerror=\"y\">&amp;&lt;{{ 7 * 7 }}"
# Tags, attributes and links that a page of ours has.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Parts(HTMLParser):
    """Collects text, tags and attribute values of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.tags, self.values = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += attributes

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read_run(make_run(tmp_path_factory.mktemp("run"), num_steps=4).inputs)


def render(run: RunData) -> str:
    return render_report(run, summarize(run), judge_run(run))


def examples_with(**texts: str) -> dict[str, Any]:
    example = {"prompt": "p", "response": "r", "label": "l", "reward": 0.0} | texts
    return {"pass_rate": 0.5, "num_prompts": 2, "examples": [example]}


def artefact_with(run: RunData, **changes: Any) -> RunData:
    artefact = Artifact("name", run.run_folder, run.run_folder, Receipt("evaluate", (), {}, {}))
    return dataclasses.replace(run, artefacts=[dataclasses.replace(artefact, **changes)])


def config_with(run: RunData, section: str, **changes: Any) -> RunData:
    part = dataclasses.replace(getattr(run.config, section), **changes)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **{section: part}))


# Where a text of others gets into the report.
PLACES: dict[str, Callable[[RunData, str], RunData]] = {
    "prompt": lambda run, text: dataclasses.replace(run, before=examples_with(prompt=text)),
    "long prompt": lambda run, text: dataclasses.replace(run, before=examples_with(prompt=text + "p" * 999)),
    "response": lambda run, text: dataclasses.replace(run, after=examples_with(response=text)),
    "long response": lambda run, text: dataclasses.replace(run, after=examples_with(response=text + "r" * 999)),
    "label": lambda run, text: dataclasses.replace(run, after=examples_with(label=text)),
    "reason": lambda run, text: dataclasses.replace(run, attempts=[{**run.attempts[0], "reason": text}]),
    "node": lambda run, text: dataclasses.replace(run, attempts=[{**run.attempts[0], "nodes": [text]}]),
    "key of an attempt": lambda run, text: dataclasses.replace(run, attempts=[{**run.attempts[0], text: "v"}]),
    "run": lambda run, text: dataclasses.replace(run, run_name=text),
    "origin": lambda run, text: dataclasses.replace(run, origins={**run.origins, "nodes": text}),
    "commit": lambda run, text: dataclasses.replace(run, commit="0" * 40 + text),
    "version": lambda run, text: dataclasses.replace(run, versions={**run.versions, "torch": text}),
    "weights": lambda run, text: dataclasses.replace(run, final_weights_sha256=text),
    "missing": lambda run, text: dataclasses.replace(run, missing=[text]),
    "ancestor": lambda run, text: dataclasses.replace(run, lineage=[{"run": text, "step": 1, "changed": {}}]),
    "change": lambda run, text: dataclasses.replace(
        run, lineage=[{"run": "r", "step": 1, "changed": {text: (text, text)}}]
    ),
    "artefact": lambda run, text: artefact_with(run, name=text),
    "damage": lambda run, text: artefact_with(run, receipt=None, damage=text),
    "input": lambda run, text: artefact_with(run, receipt=Receipt("evaluate", (), {text: "0" * 32}, {})),
    "model": lambda run, text: config_with(run, "model", name=text),
    "folder": lambda run, text: config_with(
        run, "model", source=dataclasses.replace(run.config.model.source, kind="folder", folder=text)
    ),
    "repository": lambda run, text: config_with(run, "data", repo_id=text),
    "hardware": lambda run, text: config_with(run, "hardware", name=text),
    "price": lambda run, text: config_with(run, "site", currency=text),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_text_changes_no_tag_and_is_shown_as_it_is(run: RunData, place: str) -> None:
    plain, nasty = (Parts(render(PLACES[place](run, text))) for text in ("harmless", NASTY))
    assert nasty.tags == plain.tags
    names = [name for name, _ in nasty.values]
    assert names == [name for name, _ in plain.values]
    assert NASTY in "".join(nasty.text)


def test_a_hostile_problem_is_a_text_of_the_plan(resolved) -> None:
    plan = build_plan(resolved("tiny"))
    found = ({"problems": [Problem("some-code", text, text, text, text).as_dict()]} for text in ("harmless", NASTY))
    plain, nasty = (Parts(render_plan(plan | problems, resolved("tiny"))) for problems in found)
    assert (nasty.tags, [name for name, _ in nasty.values]) == (plain.tags, [name for name, _ in plain.values])
    assert "".join(nasty.text).count(NASTY) == 4


@pytest.mark.parametrize("place", ["prompt", "response", "reason", "artefact"])
def test_what_would_not_be_seen_is_shown(run: RunData, place: str) -> None:
    hidden = "".join(
        map(chr, (*range(0x20), 0x7F, 0x85, 0x9F, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2066, 0x2069))
    )
    page = render(PLACES[place](run, f"a{hidden}z"))
    shown = "".join(map(chr, (*range(0x2400, 0x2409), 9, 10, *range(0x240B, 0x2420))))
    shown += "⟨U+007F⟩⟨U+0085⟩⟨U+009F⟩⟨U+061C⟩⟨U+200E⟩⟨U+200F⟩"
    shown += "⟨U+202A⟩⟨U+202B⟩⟨U+202C⟩⟨U+202D⟩⟨U+202E⟩⟨U+2066⟩⟨U+2069⟩"
    assert f"a{shown}z" in html.unescape(page)
    assert not set(page) & {chr(code) for code in CONTROLS}


def test_only_what_cannot_be_seen_is_replaced() -> None:
    kept = "\t\n !~\u00a0\u061b\u061d\u200d\u2010\u2029\u202f\u2065\u206a\U0001f600"
    assert kept.translate(CONTROLS) == kept
    assert len(CONTROLS) == 30 + 33 + 3 + 5 + 4


def test_numbers_and_markup_of_ours_pass() -> None:
    template = _environment().from_string("{{ number }} {{ ours }} {{ theirs }} {{ '<b>' }} {{ '<i>'|safe }}")
    ours = jinja2.utils.markupsafe.Markup("<em>\x07</em>")
    assert template.render(number=0, ours=ours, theirs="<u>\x1b") == "0 <em>␇</em> &lt;u&gt;␛ &lt;b&gt; <i>"


def test_what_a_template_was_not_given_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'config' is undefined"):
        render_page("plan.html.j2", title="t", plan={})


def test_the_browser_may_fetch_nothing(run: RunData) -> None:
    page = render(run)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert html.unescape(policy) == POLICY
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script>")


def test_values_under_the_pointer_are_the_charts_own(run: RunData) -> None:
    values = [value for name, value in Parts(render(run)).values if name == "data-values"]
    charts = [json.loads(value) for value in values]
    assert {line["label"] for chart in charts for line in chart["series"]} >= {"pass rate", "k3", "loss"}
    assert all(len(line["steps"]) == len(line["values"]) == 4 for chart in charts for line in chart["series"])


def test_backticks_become_code_and_nothing_else_becomes_html(run: RunData) -> None:
    found = Finding("bad", "title", "a <b>`snakemake -n <i>`</b>", "an open ` alone")
    page = render_report(run, summarize(run), Verdict("headline", [found]))
    assert 'a &lt;b&gt;<span class="mono">snakemake -n &lt;i&gt;</span>&lt;/b&gt;' in page
    assert "an open ` alone" in page

"""What is to be known of a plan first."""

import html

from posttrain.errors import Problem
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_page import judge_plan, render_plan


def test_what_is_doubtful_is_a_warning_on_page_and_table(resolved, capsys):
    assert [found["key"] for found in build_plan(resolved("tiny"))["warnings"]] == []
    assert build_plan(resolved("glm5"))["warnings"] == [], (
        "the local site's two nodes are no matter where it needs another site"
    )
    small = "hardware.host_memory_gib=512"
    plan = build_plan(resolved("glm5", set=small))
    assert [found["key"] for found in plan["warnings"]] == ["hardware.host_memory_gib"]
    assert plan["problems"] == []
    page = html.unescape(render_plan(plan, resolved("glm5", set=small)))
    assert page.count('<li class="warning">') == 1
    judge_plan(plan).print()
    printed = " ".join(capsys.readouterr().out.split())
    for text in (page, printed):
        assert all(found["remedy"] in text and f"{found['key']} = " in text for found in plan["warnings"])


def test_the_verdict_is_as_loud_as_the_worst_that_is_known():
    row = Problem("some-code", "nodes", "24", "1", "plan it").as_dict()
    for problems, not_trainable, warnings, headline, levels in (
        ([], [], [], "This can run", []),
        ([], [], [row], "This can run (1 warning)", ["warning"]),
        ([], [], [row, row], "This can run (2 warnings)", ["warning", "warning"]),
        ([], [row], [row], "This can be planned, but this version cannot run it", ["bad", "warning"]),
        ([row], [row], [row], "This cannot run", ["bad", "bad", "warning"]),
    ):
        plan = {"problems": problems, "not_trainable": not_trainable, "warnings": warnings, "nodes_without_site": 0}
        verdict = judge_plan(plan)
        assert (verdict.headline, [finding.level for finding in verdict.findings]) == (headline, levels)
        assert verdict.level == (levels or ["good"])[0]
        assert {(f.title, f.detail, f.remedy) for f in verdict.findings} <= {
            ("nodes = 24 [some-code]", "allowed: 1", "plan it")
        }


def test_a_plan_needs_no_site(resolved, capsys):
    plan = build_plan(resolved("glm5"))
    verdict = judge_plan(plan)
    assert (verdict.level, verdict.headline) == ("good", "This fits, and needs a site to run")
    (finding,) = verdict.findings
    assert finding.detail == f"this site is one machine, and the plan is for {plan['nodes_without_site']} nodes"
    assert "add site=NAME" in finding.remedy
    assert "cannot run" not in render_plan(plan, resolved("glm5"))
    doubtful = judge_plan(build_plan(resolved("glm5", set="hardware.host_memory_gib=512")))
    assert (doubtful.level, doubtful.headline) == ("warning", "This fits, and needs a site to run (1 warning)")
    at_a_site = build_plan(resolved("glm5", set="site.launcher=slurm site.node_names=[]"))
    assert (at_a_site["nodes_without_site"], at_a_site["not_trainable"]) == (0, [])

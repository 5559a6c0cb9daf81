"""The plan as an HTML page, with the most important notes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.load import Resolved
from posttrain.config.schema import EXPERIMENT_SECTIONS, Config
from posttrain.errors import with_code
from posttrain.plan.forecast.plan_figures import GROUPS, flag_groups, stage_groups
from posttrain.plan.forecast.plan_goodput import goodput_chart
from posttrain.plan.forecast.plan_layout import TERMS, layout_picture
from posttrain.plan.rule_chain import rule_chain
from posttrain.readable import as_text, counted
from posttrain.report.report import config_rows
from posttrain.report.report_dag import RuleState, draw_chain
from posttrain.report.report_page import render_page
from posttrain.report.verdict import Finding, Verdict


def judge_plan(plan: Mapping[str, Any]) -> Verdict:
    """Return the headline: whether the plan can run, and otherwise the changes that it needs.

    Args:
        plan: Content of `plan.json`.
    """
    levels = {"problems": "bad", "not_trainable": "bad", "warnings": "warning"}
    findings = [
        Finding(
            level, with_code(f"{row['key']} = {row['value']}", row["code"]), f"allowed: {row['allowed']}", row["remedy"]
        )
        for part, level in levels.items()
        for row in plan[part]
    ]
    if plan["problems"]:
        return Verdict("This cannot run", findings)
    if plan["not_trainable"]:
        return Verdict("This can be planned, but this version cannot run it", findings)
    doubts = f" ({counted(len(findings), 'warning')})" if findings else ""
    if not plan["nodes_without_site"]:
        return Verdict(f"This can run{doubts}", findings)
    nodes = f"this site is one machine, and the plan is for {counted(plan['nodes_without_site'], 'node')}"
    remedy = "copy config/sites/example_slurm.yaml or example_kubernetes.yaml, fill it in, and add site=NAME"
    return Verdict(f"This fits, and needs a site to run{doubts}", [*findings, Finding("good", "A site", nodes, remedy)])


def render_plan(plan: Mapping[str, Any], resolved: Resolved) -> str:
    """Return the plan as one self-contained HTML page.

    Args:
        plan: Content of `plan.json`.
        resolved: The configuration.
    """
    verdict = judge_plan(plan)
    config = resolved.config
    rules = rule_chain(config, is_fork=bool(resolved.fork))
    planned = {rule.name: RuleState("planned", plan["durations_seconds"].get(rule.name)) for rule in rules}
    groups = stage_groups(plan["trainer"])
    return render_page(
        "plan.html.j2",
        plan=plan,
        verdict=verdict,
        config=config,
        title=plan_title(config),
        chain=draw_chain(rules, planned),
        nodes=layout_picture(config),
        terms=TERMS,
        stage_groups=groups,
        fullest=next(group for group in groups if group.is_fullest),
        memory_groups=GROUPS,
        as_text=as_text,
        goodput_chart=plan["goodput"] and goodput_chart(plan["goodput"]),
        proposed_layouts=[(str(place), row) for place, row in enumerate(plan["layouts"]["proposed"], start=1)],
        flag_groups=flag_groups(plan["flags"]),
        config_sections=config_rows(config, resolved.origins),
        experiment_sections=EXPERIMENT_SECTIONS,
    )


def plan_title(config: Config) -> str:
    """Return the plan's title: "GLM-5 on 24 × 8 H200"."""
    model = config.model.source.repo_id.rpartition("/")[2] or config.model.name
    return f"{model} on {config.nodes} × {config.hardware.gpus_per_node} {config.hardware.name.upper()}"

"""Write the plan of a configuration as JSON and as a page: layout, memory, disk and durations."""

from __future__ import annotations

from posttrain.errors import Problem, raise_if_any
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_page import judge_plan, render_plan
from posttrain.plan.forecast.plan_table import print_plan
from posttrain.plan.preflight.sandbox import describe_sandbox
from posttrain.plan.rehearsal_record import describe_rehearsal
from posttrain.rl.data.local_check import check_data_files
from posttrain.store import Paths, write_json, write_text


def main(paths: Paths, jobs_at_once: int | None) -> None:
    """Compute, write and show the plan, then fail if there are problems."""
    plan, page = build_plan(paths.resolved, jobs_at_once), paths.plan.with_suffix(".html")
    plan["problems"] += [problem.as_dict() for problem in check_data_files(paths.resolved.config, must_exist=False)]
    plan["rehearsal"] = describe_rehearsal(paths)
    plan["sandbox"] = describe_sandbox(paths.resolved.config)
    write_text(page, render_plan(plan, paths.resolved))
    write_json(paths.plan, plan)
    print_plan(plan)
    judge_plan(plan).print()
    print(f"rehearsal: {plan['rehearsal']['words']}")
    if plan["sandbox"]:
        print(f"sandbox: {plan['sandbox']}")
    print(f"plan: {page.resolve()}", flush=True)
    raise_if_any([Problem(**problem) for problem in plan["problems"]])

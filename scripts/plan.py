"""Write plan.json and plan.html: layout, memory, disk and durations of a configuration, before any work."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import write_json, write_text
from posttrain.cli import add_configuration, run
from posttrain.errors import Problem, raise_if_any
from posttrain.forecast.plan import build_plan
from posttrain.forecast.plan_page import judge_plan, render_plan
from posttrain.forecast.plan_table import print_plan


def main() -> None:
    """Compute, write, show, and end with the problems."""
    arguments = parse_arguments()
    resolved = arguments.resolved
    plan = build_plan(resolved, arguments.jobs_at_once)
    write_text(arguments.html, render_plan(plan, resolved))
    write_json(arguments.json, plan)
    print_plan(plan)
    judge_plan(plan).print()
    print(f"plan: {arguments.html.resolve()}", flush=True)
    raise_if_any([Problem(**problem) for problem in plan["problems"]])


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    parser.add_argument("--jobs-at-once", type=int, help="jobs that run side by side; by default all of a rule")
    parser.add_argument("--json", type=Path, required=True, help="plan.json to write")
    parser.add_argument("--html", type=Path, required=True, help="plan.html to write")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

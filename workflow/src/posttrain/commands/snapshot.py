"""Write snapshot.html: a report of a run at any time before, during or after training."""

from __future__ import annotations

from pathlib import Path

from posttrain.cluster.slurm_query import job_is_alive
from posttrain.report.report import render_report
from posttrain.report.report_data import read_run_so_far
from posttrain.report.report_summary import print_summary, summarize
from posttrain.report.verdict import judge_run
from posttrain.store import Paths, write_text
from posttrain.store.lease import living_holder


def main(paths: Paths) -> None:
    """Render the run's current data; neither the run nor its report is changed."""
    holder = living_holder(paths.lease, job_is_alive=job_is_alive)
    so_far = read_run_so_far(paths, Path("logs"), holder.since_unix if holder else None)
    verdict, summary = judge_run(so_far), summarize(so_far)
    write_text(paths.snapshot, render_report(so_far, summary, verdict))
    print_summary(summary)
    verdict.print()
    if so_far.missing:
        steps = f"{so_far.num_steps} of {so_far.config.training.num_steps} steps"
        print(f"so far {steps}; not there yet: {', '.join(so_far.missing)}")
    print(f"snapshot: {paths.snapshot.resolve()}")

"""Write summary.json and report.html of a finished run."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import write_json, write_text
from posttrain.cli import run
from posttrain.observability.report import render_report
from posttrain.observability.report_data import ReportInputs, read_run
from posttrain.observability.report_summary import print_summary, summarize
from posttrain.observability.verdict import judge_run


def main() -> None:
    """Read what the run left, condense it, draw it."""
    arguments = parse_arguments()
    finished = read_run(
        ReportInputs(
            config=arguments.config,
            run_folder=arguments.run_folder,
            before=arguments.before,
            after=arguments.after,
            export_receipt=arguments.export_receipt,
            logs=arguments.logs,
        )
    )
    verdict = judge_run(finished)
    summary = summarize(finished)
    write_text(arguments.report, render_report(finished, summary, verdict))
    write_json(arguments.summary, summary | {"verdict": verdict.as_dict()})
    print_summary(summary)
    verdict.print()
    print(f"report: {arguments.report.resolve()}")


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.yaml")
    parser.add_argument("--run-folder", type=Path, required=True, help="results/{run}")
    parser.add_argument("--before", type=Path, required=True, help="evaluation before training, JSON")
    parser.add_argument("--after", type=Path, required=True, help="evaluation after training, JSON")
    parser.add_argument("--export-receipt", type=Path, required=True, help="receipt of the HF export")
    parser.add_argument("--logs", type=Path, required=True, help="folder with logs and benchmark files by rule")
    parser.add_argument("--summary", type=Path, required=True, help="summary.json to write")
    parser.add_argument("--report", type=Path, required=True, help="report.html to write")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)

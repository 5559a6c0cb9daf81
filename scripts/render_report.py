"""Write summary.json and report.html of a finished run, and the receipt of both."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli import command_line, run
from posttrain.report.report import render_report
from posttrain.report.report_data import ReportInputs, read_run
from posttrain.report.report_summary import print_summary, summarize
from posttrain.report.verdict import judge_run
from posttrain.store import Receipt, read_receipt, receipt_of, record_files, write_json, write_receipt, write_text


def main() -> None:
    """Read the run's results, summarize them, render the report."""
    arguments = command_line(
        __doc__,
        config=(Path, "config.resolved.yaml"),
        run_folder=(Path, "results/{run}"),
        before=(Path, "evaluation before training, JSON"),
        after=(Path, "evaluation after training, JSON"),
        export_receipt=(Path, "receipt of the HF export"),
        logs=(Path, "folder with logs and benchmark files by rule"),
        summary=(Path, "summary.json to write"),
        report=(Path, "report.html to write"),
    )
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
    write_receipt(receipt_of(arguments.report), describe_report(arguments))
    print_summary(summary)
    verdict.print()
    print(f"report: {arguments.report.resolve()}")


def describe_report(arguments: argparse.Namespace) -> Receipt:
    """Return the receipt of the report's contents, including the shown configuration."""
    run_folder, inputs = arguments.run_folder, {}
    shown = (arguments.report, arguments.summary, arguments.config)
    files = record_files(run_folder, (path.relative_to(run_folder).as_posix() for path in shown))
    made_from = {"export": arguments.export_receipt, "train": run_folder / "train" / "done.json"}
    made_from |= {"export check": receipt_of(run_folder / "export_check.json")}
    made_from |= {f"evaluation {path.stem}": receipt_of(path) for path in (arguments.before, arguments.after)}
    for name, path in made_from.items():
        # Earlier versions wrote no receipts of evaluations.
        inputs |= {name: read_receipt(path).digest} if path.exists() else {}
    return Receipt("render_report", files, inputs, {})


if __name__ == "__main__":
    run(main)

# Results for users: the state of runs, and the final report.


rule render_report:
    """Renders the report and the summary of a run."""
    input:
        config=PATHS.config,
        train=PATHS.train_done,
        export=receipt_of(PATHS.hf_export),
        checked=receipt_of(PATHS.export_check),
        before=PATHS.evaluation("before"),
        after=PATHS.evaluation("after"),
    output:
        # Deleted first; see `evaluate`.
        receipt=receipt_of(PATHS.run / "report.html"),
        summary=report(PATHS.summary, category="Run", labels={"what": "summary"}),
        report=report(PATHS.run / "report.html", category="Run", labels={"what": "report"}),
    log:
        PATHS.run_log("render_report"),
    benchmark:
        PATHS.run_log("render_report").with_suffix(".benchmark.tsv")
    localrule: True
    params:
        run_folder=PATHS.run,
    message:
        f"render the report of {RESOLVED.run}{NEEDS.message('render_report')}"
    shell:
        runs(
            "render_report",
            "--config {input.config:q} --run-folder {params.run_folder:q}",
            "--before {input.before:q} --after {input.after:q} --export-receipt {input.export:q} --logs logs",
            "--summary {output.summary:q} --report {output.report:q}",
        )


rule status:
    """Answers: the state of runs, and jobs in the queue."""
    log:
        PATHS.run_log("status"),
    localrule: True
    message:
        "where runs stand"
    shell:
        runs("status", FROM_CONFIG)


# Without output, so that it is rendered on every request, during and after training.
rule snapshot:
    """Answers: the report of a run so far."""
    log:
        PATHS.run_log("snapshot"),
    localrule: True
    message:
        f"report of {RESOLVED.run} so far"
    shell:
        runs("snapshot", FROM_CONFIG)

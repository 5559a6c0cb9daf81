# What a user reads: where runs stand, and in the end the report.


rule render_report:
    input:
        config=PATHS.config,
        train=PATHS.train_done,
        export=receipt_of(PATHS.hf_export),
        before=PATHS.evaluation("before"),
        after=PATHS.evaluation("after"),
    output:
        summary=PATHS.summary,
        report=PATHS.run / "report.html",
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
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/render_report.py --config {input.config:q} --run-folder {params.run_folder:q}"
        " --before {input.before:q} --after {input.after:q} --export-receipt {input.export:q} --logs logs"
        " --summary {output.summary:q} --report {output.report:q}"


rule status:
    log:
        PATHS.run_log("status"),
    localrule: True
    message:
        "where runs stand"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain status --resolved {RESOLVED_FILE:q}"


# No output: it is drawn each time that it is asked for, while training runs and when all is done.
rule snapshot:
    log:
        PATHS.run_log("snapshot"),
    localrule: True
    message:
        f"report of {RESOLVED.run} so far"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain snapshot --resolved {RESOLVED_FILE:q}"

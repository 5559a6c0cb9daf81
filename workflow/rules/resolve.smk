# The configuration of this run on disk, its plan, and what must be there before work starts.


rule resolve_config:
    input:
        lambda wildcards: may_run(),
    output:
        # They stay until they are replaced: what a run has begun with is never not to be seen.
        experiment=update(PATHS.experiment),
        resolved=update(PATHS.config),
    log:
        PATHS.run_log("resolve_config"),
    benchmark:
        PATHS.run_log("resolve_config").with_suffix(".benchmark.tsv")
    # What cannot be trained is refused before hours of other work.
    priority: 100
    localrule: True
    params:
        content=artifacts.digest8(dataclasses.asdict(CFG)),
    message:
        f"write the configuration of {RESOLVED.run}"
    shell:
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/resolve_config.py --resolved {RESOLVED_FILE:q}"
        " --experiment {output.experiment:q} --config {output.resolved:q}"


rule plan:
    log:
        PATHS.run_log("plan"),
    localrule: True
    params:
        # Elsewhere a scheduler decides it.
        jobs_at_once=f" --jobs-at-once {workflow.cores}" if CFG.site.launcher == "local" else "",
    message:
        f"plan {CFG.model.name} on {NODES} of {CFG.hardware.name}: layout, memory, storage, durations"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain plan --resolved {RESOLVED_FILE:q}{params.jobs_at_once}"


rule check:
    log:
        PATHS.run_log("check"),
    localrule: True
    message:
        f"check what {RESOLVED.run} needs on this machine"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain check --resolved {RESOLVED_FILE:q}"

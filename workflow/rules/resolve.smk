# Writes this run's configuration and plan, and checks requirements before work starts.


rule resolve_config:
    """Writes the configuration of a run, and registers its use of the store."""
    input:
        lambda wildcards: may_run(),
    output:
        # `update` keeps the old files until they are replaced, so a run's configuration is always readable.
        experiment=update(PATHS.experiment),
        resolved=update(PATHS.config),
    log:
        PATHS.run_log("resolve_config"),
    benchmark:
        PATHS.run_log("resolve_config").with_suffix(".benchmark.tsv")
    # Reject untrainable configurations before hours of other work.
    priority: 100
    localrule: True
    params:
        content=store.digest8(dataclasses.asdict(CFG)),
    message:
        f"write the configuration of {RESOLVED.run}"
    shell:
        runs("resolve_config", FROM_CONFIG, "--experiment {output.experiment:q} --config {output.resolved:q}")


rule plan:
    """Answers: memory, storage, durations and flags of a configuration, as a page (faster: `posttrain plan`)."""
    log:
        PATHS.run_log("plan"),
    localrule: True
    params:
        # With a scheduler, the scheduler decides.
        jobs_at_once=f"--jobs-at-once {workflow.cores}" if CFG.site.launcher == "local" else "",
    message:
        f"plan {CFG.model.name} on {NODES} of {CFG.hardware.name}: layout, memory, storage, durations"
    shell:
        runs("plan", FROM_CONFIG, "{params.jobs_at_once}")


rule rehearse:
    """Answers: what would fail in training on GPUs, tested without a GPU (`make env-rehearsal`)."""
    log:
        PATHS.run_log("rehearse"),
    localrule: True
    message:
        f"rehearse {CFG.model.name} on {NODES} of {CFG.hardware.name}: two steps at full size, without a GPU"
    shell:
        runs("rehearse", FROM_CONFIG)


rule check:
    """Answers: what this machine lacks for a run."""
    log:
        PATHS.run_log("check"),
    localrule: True
    message:
        f"check what {RESOLVED.run} needs on this machine"
    shell:
        runs("check", FROM_CONFIG)

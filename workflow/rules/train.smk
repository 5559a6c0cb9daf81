# Training: one resumable job. Its run folder is a parameter, not an output, because Snakemake would delete checkpoints.


rule fork_checkpoint:
    """Begins a run with the state of another."""
    input:
        until_made(PATHS.fork_receipt, PATHS.experiment),
        lambda wildcards: may_run(),
    output:
        PATHS.fork_receipt,
    log:
        PATHS.run_log("fork_checkpoint"),
    benchmark:
        PATHS.run_log("fork_checkpoint").with_suffix(".benchmark.tsv")
    localrule: True
    message:
        f"begin {RESOLVED.run} with the state of {RESOLVED.fork}"
    shell:
        runs("fork_checkpoint", FROM_CONFIG, "--receipt {output:q}")


CHECKED, IS_TRAINED = receipt_of(PATHS.data_check), PATHS.train_done.exists()
APPROVED = [receipt_of(PATHS.environment_check)] if CFG.data.environment else []
SANDBOX = [CFG.sandbox] if needs_sandbox(CFG) else []


rule approve_data:
    """Grades every label as if it were the response, before anything is trained."""
    input:
        checkpoint=receipt_of(PATHS.hf_patched),
        dataset=receipt_of(PATHS.dataset),
        suites=[receipt_of(folder) for folder in SUITE_FOLDERS.values()],
        run=lambda wildcards: may_run(),
    output:
        receipt=CHECKED,
        found=PATHS.data_check,
    log:
        PATHS.run_log("approve_data"),
    benchmark:
        PATHS.run_log("approve_data").with_suffix(".benchmark.tsv")
    priority: 50
    params:
        format_version=FORMAT_VERSIONS["approve_data"],
        # A changed limit or grader repeats the check.
        settings=lambda wildcards: settings_of(CFG.data, CFG.reward, CFG.rollout, *SANDBOX),
        checkpoint=PATHS.hf_patched,
        dataset=PATHS.dataset,
    message:
        f"check prompts, labels and graders{NEEDS.message('approve_data')}"
    shell:
        runs(
            "approve_data",
            FROM_CONFIG,
            "--checkpoint {params.checkpoint:q}",
            "--dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --output {output.found:q}",
            where=IN_IMAGE,
        )


if CFG.data.environment:

    rule approve_environment:
        """Plays scripted agents in the environment, before anything is trained."""
        input:
            checkpoint=receipt_of(PATHS.hf_patched),
            dataset=receipt_of(PATHS.dataset),
            run=lambda wildcards: may_run(),
        output:
            receipt=receipt_of(PATHS.environment_check),
            found=PATHS.environment_check,
        log:
            PATHS.run_log("approve_environment"),
        benchmark:
            PATHS.run_log("approve_environment").with_suffix(".benchmark.tsv")
        priority: 50
        params:
            format_version=FORMAT_VERSIONS["approve_environment"],
            # A changed limit, or a changed file of the environment (its digest), repeats the check.
            settings=lambda wildcards: settings_of(CFG.data, CFG.environment, CFG.reward, CFG.rollout, *SANDBOX),
            checkpoint=PATHS.hf_patched,
            dataset=PATHS.dataset,
        message:
            f"play scripted agents in the environment{NEEDS.message('approve_environment')}"
        shell:
            runs(
                "approve_environment",
                FROM_CONFIG,
                "--checkpoint {params.checkpoint:q}",
                "--dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --output {output.found:q}",
                where=IN_IMAGE,
            )


rule check_data:
    """Answers: whether prompts, labels, tokenizer and graders agree."""
    input:
        receipt_of(PATHS.hf_patched),
        receipt_of(PATHS.dataset),
        [receipt_of(folder) for folder in SUITE_FOLDERS.values()],
    log:
        PATHS.run_log("check_data"),
    message:
        f"show prompts, grade every label of {RESOLVED.run}"
    shell:
        runs("check_data", FROM_CONFIG, where=IN_IMAGE)


rule train:
    """Trains in one resumable job."""
    input:
        torch_dist=receipt_of(PATHS.torch_dist),
        rollout=receipt_of(PATHS.rollout_weights),
        dataset=receipt_of(PATHS.dataset),
        # Runs trained by a version without these checks stay valid.
        checked=until_made(PATHS.train_done, CHECKED) if CHECKED.exists() or not IS_TRAINED else [],
        approved=[until_made(PATHS.train_done, path) for path in APPROVED if path.exists() or not IS_TRAINED],
        # Not reasons to train again: topology and engineering may change between attempts, the experiment never does.
        experiment=until_made(PATHS.train_done, PATHS.experiment),
        resolved=until_made(PATHS.train_done, PATHS.config),
        staged=until_made(PATHS.train_done, PATHS.run / "node_local.staged"),
        fork=until_made(PATHS.train_done, PATHS.fork_receipt) if RESOLVED.fork else [],
        run=lambda wildcards: may_run(),
    output:
        PATHS.train_done,
    log:
        PATHS.run_log("train"),
    benchmark:
        PATHS.run_log("train").with_suffix(".benchmark.tsv")
    threads: workflow.cores if CFG.site.launcher == "local" else CFG.site.slurm.cpus_per_node
    resources:
        # Topology is a resource: a change of it resumes the run instead of restarting it.
        **resources_of_training(CFG, PATHS.train / "lease"),
    params:
        format_version=FORMAT_VERSIONS["train_grpo"],
        run_folder=PATHS.train,
        torch_dist=PATHS.torch_dist,
        rollout=PATHS.rollout_weights,
        dataset=PATHS.dataset,
    message:
        f"train {RESOLVED.run} with {RESOLVED.algorithm}: {CFG.training.num_steps} steps on {CFG.hardware.name}{NEEDS.message('train', *REHEARSED)}"
    shell:
        runs(
            "train",
            "--experiment {input.experiment:q} --config {input.resolved:q}",
            "--run-folder {params.run_folder:q} --torch-dist {params.torch_dist:q} --torch-dist-receipt {input.torch_dist:q}",
            "--rollout-weights {params.rollout:q} --rollout-receipt {input.rollout:q}",
            "--dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --data-check",
            literal(PATHS.data_check),
            "--data-check-receipt {input.checked:q} --node-local",
            # Not a param, because another node name would repeat a finished run.
            literal(PATHS.node_local("{node}")),
            "--fork {input.fork:q} --done {output:q}",
            where=ON_ALL_NODES,
        )


if not workflow.is_main_process and "train_grpo:" in sys.argv:

    # For jobs that version 0.2 submitted and that start only now.
    use rule train as train_grpo


rule preflight:
    """Answers: faults of a training job's nodes, including spare ones, without training."""
    input:
        lambda wildcards: may_look_at_nodes(),
    log:
        PATHS.run_log("preflight"),
    threads: workflow.cores if CFG.site.launcher == "local" else CFG.site.slurm.cpus_per_node
    resources:
        **resources_of_training(CFG, None),
    message:
        f"look at the nodes of {RESOLVED.run}, {CFG.hardware.name}{NEEDS.message('preflight')}"
    shell:
        runs("preflight", FROM_CONFIG)


rule attach:
    """Waits for training that outlived its driver."""
    log:
        PATHS.run_log("attach"),
    localrule: True
    message:
        f"wait for the training of {RESOLVED.run} that goes on without its driver"
    shell:
        runs("attach", FROM_CONFIG)


rule replay:
    """Answers: whether the newest step, replayed from its stored rollout, gives the same bits."""
    log:
        PATHS.run_log("replay"),
    localrule: True
    message:
        f"train the newest step of {RESOLVED.run} again"
    shell:
        runs("replay", FROM_CONFIG)

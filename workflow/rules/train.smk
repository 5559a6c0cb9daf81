# Training: one resumable job. Its run folder is a parameter, never an output: Snakemake would delete checkpoints.


# Not params, for which a finished run would be trained again: this node's disk, and the nodes.
NODE_LOCAL = PATHS.node_local("{node}")


# A fork begins with another run's checkpoint, which is linked, not copied.
rule fork_checkpoint:
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
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/fork_checkpoint.py --resolved {RESOLVED_FILE:q}" " --receipt {output:q}"


rule train_grpo:
    input:
        torch_dist=receipt_of(PATHS.torch_dist),
        rollout=receipt_of(PATHS.rollout_weights),
        dataset=receipt_of(PATHS.dataset),
        # No reasons to train again: topology and engineering may change between attempts, the experiment never does.
        experiment=until_made(PATHS.train_done, PATHS.experiment),
        resolved=until_made(PATHS.train_done, PATHS.config),
        staged=until_made(PATHS.train_done, PATHS.run / "node_local.staged"),
        fork=until_made(PATHS.train_done, PATHS.fork_receipt) if RESOLVED.fork else [],
        run=lambda wildcards: may_run(),
    output:
        PATHS.train_done,
    log:
        PATHS.run_log("train_grpo"),
    benchmark:
        PATHS.run_log("train_grpo").with_suffix(".benchmark.tsv")
    threads: workflow.cores if CFG.site.launcher == "local" else CFG.site.slurm.cpus_per_node
    resources:
        # Topology is a resource: a change of it resumes the run instead of starting it anew.
        **resources_of_training(CFG, PATHS.train / "lease"),
    params:
        format_version=FORMAT_VERSIONS["train_grpo"],
        run_folder=PATHS.train,
        torch_dist=PATHS.torch_dist,
        rollout=PATHS.rollout_weights,
        dataset=PATHS.dataset,
    message:
        f"train {RESOLVED.run} with {RESOLVED.algorithm}: {CFG.training.num_steps} steps on {NODES} of {CFG.hardware.name}{NEEDS.message('train_grpo', with_nodes=False)}"
    shell:
        "POSTTRAIN_LOG={log:q} {ON_ALL_NODES}python {SCRIPTS}/train_grpo.py --experiment {input.experiment:q} --config {input.resolved:q}"
        " --run-folder {params.run_folder:q} --torch-dist {params.torch_dist:q} --torch-dist-receipt {input.torch_dist:q}"
        " --rollout-weights {params.rollout:q} --rollout-receipt {input.rollout:q}"
        " --dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --node-local {NODE_LOCAL:q}"
        " --fork {input.fork:q} --done {output:q}"


# What training does first, by itself and with its spare nodes, for a cluster's administrator; a job of its own.
rule preflight:
    input:
        lambda wildcards: may_look_at_nodes(),
    log:
        PATHS.run_log("preflight"),
    threads: workflow.cores if CFG.site.launcher == "local" else CFG.site.slurm.cpus_per_node
    resources:
        **resources_of_training(CFG, None),
    message:
        f"look at the nodes of {RESOLVED.run}: {counted(nodes_with_spares(CFG), 'node')} of {CFG.hardware.name}"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain preflight --resolved {RESOLVED_FILE:q}"


# Training whose driver died may live on where a scheduler runs it.
rule attach:
    log:
        PATHS.run_log("attach"),
    localrule: True
    message:
        f"wait for the training of {RESOLVED.run} that goes on without its driver"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain attach --resolved {RESOLVED_FILE:q}"

# GRPO: one resumable job. Its run folder is a parameter, never an output: Snakemake would delete checkpoints.


# On one machine the first simulated node is this one. Not params, for which a finished run would be trained again.
THIS_NODE = CFG.site.node_names[0] if CFG.site.node_names else "this_node"
NODE_LOCAL = PATHS.node_local(THIS_NODE)


rule train_grpo:
    input:
        torch_dist=receipt_of(PATHS.torch_dist),
        rollout=receipt_of(PATHS.rollout_weights),
        dataset=receipt_of(PATHS.dataset),
        # No reasons to train again: topology and engineering may change between attempts, the experiment never does.
        experiment=ancient(PATHS.experiment),
        resolved=ancient(PATHS.config),
        staged=ancient(PATHS.run / "node_local.staged"),
    output:
        PATHS.train_done,
    log:
        PATHS.run_log("train_grpo"),
    benchmark:
        PATHS.run_log("train_grpo").with_suffix(".benchmark.tsv")
    threads: workflow.cores if CFG.site.launcher == "local" else 1
    resources:
        # Topology is a resource: a change of it resumes the run instead of starting it anew.
        nodes=CFG.nodes,
    params:
        format_version=FORMAT_VERSIONS["train_grpo"],
        run_folder=PATHS.train,
        torch_dist=PATHS.torch_dist,
        rollout=PATHS.rollout_weights,
        dataset=PATHS.dataset,
    message:
        f"GRPO {RESOLVED.run}: {CFG.training.num_steps} steps on {NODES} of {CFG.hardware.name}{NEEDS.message('train_grpo', with_nodes=False)}"
    shell:
        "POSTTRAIN_LOG={log:q} {ON_ALL_NODES}python {SCRIPTS}/train_grpo.py --experiment {input.experiment:q} --config {input.resolved:q}"
        " --run-folder {params.run_folder:q} --torch-dist {params.torch_dist:q} --torch-dist-receipt {input.torch_dist:q}"
        " --rollout-weights {params.rollout:q} --rollout-receipt {input.rollout:q}"
        " --dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --node-local {NODE_LOCAL:q}"
        " --node {THIS_NODE:q} --done {output:q}"

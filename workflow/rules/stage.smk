# Verified copies on every node's own disk, so that a start does not read the shared file system N times.


# Nodes that get a copy. A finished run keeps its nodes, so a change of nodes copies nothing.
if PATHS.train_done.exists():
    STAGED = sorted(PATHS.node_record("any").parent.glob("*.json"))
else:
    STAGED = [PATHS.node_record(node) for node in CFG.site.node_names if CFG.stage.copy != "nothing"]


rule stage_to_node_local:
    """Copies the checkpoints to one node's own disk and verifies them."""
    input:
        torch_dist=receipt_of(PATHS.torch_dist),
        rollout=receipt_of(PATHS.rollout_weights),
        run=lambda wildcards: may_run(),
    output:
        PATHS.node_record("{node}"),
    log:
        PATHS.run_log("stage_to_node_local", ".{node}"),
    benchmark:
        PATHS.run_log("stage_to_node_local", ".{node}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["stage_to_node_local"],
        torch_dist=PATHS.torch_dist,
        rollout=PATHS.rollout_weights,
        destination=lambda wildcards: PATHS.node_local(wildcards.node),
        peers=PATHS.node_record("any").with_name("broadcast"),
        # Selects a node's files: slices follow the layout, and some or all nodes need no engine weights.
        choice=[
            CFG.stage.copy,
            *([str(CFG.nodes), str(CFG.parallel)] if CFG.stage.copy == "slices" else []),
            *([] if engines_load(CFG) else ["no engine's weights"]),
            *([f"{CFG.engine.own_nodes} of {CFG.nodes} nodes"] if CFG.engine.own_nodes else []),
        ],
    message:
        f"copy the checkpoints to the disk of {{wildcards.node}} and verify them{NEEDS.message('stage_to_node_local')}"
    shell:
        runs(
            "stage_to_node_local",
            FROM_CONFIG,
            "--torch-dist {params.torch_dist:q} --torch-dist-receipt {input.torch_dist:q}",
            "--rollout-weights {params.rollout:q} --rollout-receipt {input.rollout:q} --node {wildcards.node}",
            "--destination {params.destination:q} --peers {params.peers:q} --record {output:q}",
            where=IN_IMAGE,
        )


# Training depends on this file instead of the nodes' records, so a change of nodes does not repeat a finished run.
rule stage_all_nodes:
    """Waits for the copies of all nodes."""
    input:
        STAGED,
    output:
        touch(PATHS.run / "node_local.staged"),
    localrule: True
    message:
        f"staged on {counted(len(STAGED), 'node')}"

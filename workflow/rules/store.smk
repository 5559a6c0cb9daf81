# Proves the origin of every byte, and finds unused files in the shared store.


rule verify:
    """Answers: the origin of every byte of a run."""
    input:
        receipt_of(PATHS.hf_export),
    log:
        PATHS.run_log("verify"),
    message:
        "prove where every byte of the run came from"
    shell:
        runs("verify", FROM_CONFIG, where=IN_IMAGE)


rule verify_store:
    """Answers: the origin of every byte of the checkpoints, with or without training."""
    input:
        receipt_of(PATHS.dataset),
        receipt_of(PATHS.torch_dist),
        receipt_of(PATHS.rollout_weights),
    log:
        PATHS.run_log("verify_store"),
    message:
        "prove where every byte of the checkpoints came from"
    shell:
        runs("verify_store", FROM_CONFIG, where=IN_IMAGE)


rule gc:
    """Answers: files in the store that no run needs; gc=delete deletes them."""
    log:
        PATHS.run_log("gc"),
    localrule: True
    message:
        "what of the store no run needs"
    shell:
        runs("gc", FROM_CONFIG)

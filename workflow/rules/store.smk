# The proof of where every byte came from, and what of the shared store nobody needs any more.


rule verify:
    """Answers: where every byte of a run came from."""
    input:
        receipt_of(PATHS.hf_export),
    log:
        PATHS.run_log("verify"),
    message:
        "prove where every byte of the run came from"
    shell:
        runs("verify", FROM_CONFIG, where=IN_IMAGE)


rule verify_store:
    """Answers: where every byte of the checkpoints came from, before training or without."""
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
    """Answers: what of the store no run needs; gc=delete frees it."""
    log:
        PATHS.run_log("gc"),
    localrule: True
    message:
        "what of the store no run needs"
    shell:
        runs("gc", FROM_CONFIG)
